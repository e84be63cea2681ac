# Warnings and sanitizers for our own targets; never exported.
add_library(qfilters_flags INTERFACE)
target_compile_options(
  qfilters_flags
  INTERFACE -Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wconversion
            $<$<COMPILE_LANGUAGE:CXX>:-Wold-style-cast>
            $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
            $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>
            # GCC 12 warns falsely about std::string concatenation (PR 105651).
            $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
            # Scores must not be fused: their bits are part of the contract.
            -ffp-contract=off)
if(QFILTERS_SANITIZE)
  target_compile_options(
    qfilters_flags
    INTERFACE -fsanitize=${QFILTERS_SANITIZE}
              -fno-omit-frame-pointer
              -fno-sanitize-recover=all
              # Instrumented, GCC 12 warns falsely about <regex> (PR 105562).
              $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(qfilters_flags INTERFACE -fsanitize=${QFILTERS_SANITIZE})
endif()
