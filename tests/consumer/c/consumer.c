/* Reads the filters that the C++ consumer has written. */
#include <qfilters/c_api.h>
#include <stdio.h>

int main(int argc, char** argv) {
  qf_filters* filters = NULL;
  size_t heads = 0;
  size_t dim = 0;
  if (argc != 2) return 2;
  if (qf_filters_load(argv[1], NULL, NULL, &filters) != QF_OK ||
      qf_filters_shape(filters, 0, &heads, &dim) != QF_OK) {
    fprintf(stderr, "%s\n", qf_last_error());
    return 1;
  }
  qf_filters_free(filters);
  printf("%s %zu %zu\n", qf_version(), heads, dim);
  return heads == 1 && dim == 2 ? 0 : 1;
}
