#pragma once

// Everything of the core library.

#include "qfilters/attention.h"
#include "qfilters/cache_builder.h"
#include "qfilters/calibrator.h"
#include "qfilters/config.h"
#include "qfilters/error.h"
#include "qfilters/filter_bank.h"
#include "qfilters/fingerprint.h"
#include "qfilters/isa.h"
#include "qfilters/kv_cache.h"
#include "qfilters/kv_store.h"
#include "qfilters/limits.h"
#include "qfilters/policy.h"
#include "qfilters/row_pool.h"
#include "qfilters/rows_view.h"
#include "qfilters/scoring.h"
#include "qfilters/selection.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/snapshot.h"
#include "qfilters/tensor_view.h"
#include "qfilters/version.h"
