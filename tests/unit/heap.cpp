#include "unit/heap.h"

#include <cstdlib>
#include <new>

#include <malloc.h>

namespace qfilters::test {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 30;
constinit Heap g_heap;

void* allocate(std::size_t size, std::size_t alignment) {
  ++g_heap.allocations;
  const bool fails = size > kMostBytes ||
                     (g_heap.until_failure > 0 && --g_heap.until_failure == 0);
  void* const memory =
      fails ? nullptr
            : std::aligned_alloc(
                  alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  const std::size_t bytes = ::malloc_usable_size(memory);
  const std::size_t live = g_heap.live_bytes += bytes;
  std::size_t peak = g_heap.peak_bytes;
  while (peak < live && !g_heap.peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  g_heap.live_bytes -= ::malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

Heap& heap() noexcept {
  return g_heap;
}

}  // namespace qfilters::test

void* operator new(std::size_t size) {
  return qfilters::test::allocate(size, alignof(std::max_align_t));
}

void* operator new(std::size_t size, std::align_val_t alignment) {
  return qfilters::test::allocate(size, static_cast<std::size_t>(alignment));
}

void operator delete(void* memory) noexcept {
  qfilters::test::release(memory);
}

void operator delete(void* memory, std::size_t /*size*/) noexcept {
  qfilters::test::release(memory);
}

void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept {
  qfilters::test::release(memory);
}
