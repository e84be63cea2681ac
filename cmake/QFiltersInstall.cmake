# Install rules and the package files for find_package(qfilters).
include(CMakePackageConfigHelpers)

install(
  TARGETS qfilters qfilters_c qfilters_io
  EXPORT qfiltersTargets
  FILE_SET HEADERS)
install(
  EXPORT qfiltersTargets
  NAMESPACE qfilters::
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/qfilters)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/qfiltersConfig.cmake.in
  ${PROJECT_BINARY_DIR}/qfiltersConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/qfilters)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/qfiltersConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/qfiltersConfig.cmake
        ${PROJECT_BINARY_DIR}/qfiltersConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/qfilters)
