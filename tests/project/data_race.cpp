// A data race on purpose: shows that ThreadSanitizer sees our threads.
#include <cstdio>

int main() {
  long count = 0;
#pragma omp parallel for num_threads(2)
  for (int i = 0; i < 100000; ++i) {
    ++count;
  }
  std::printf("%ld\n", count);
}
