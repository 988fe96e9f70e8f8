# Highway::hwy, from the archive where there is one. Distributions name and ship it differently:
# Debian 12 has the shared library only.
include(FindPackageHandleStandardArgs)
find_path(Highway_INCLUDE_DIR hwy/highway.h)
find_library(Highway_LIBRARY NAMES libhwy.a hwy)
mark_as_advanced(Highway_INCLUDE_DIR Highway_LIBRARY)
find_package_handle_standard_args(Highway
  REQUIRED_VARS Highway_LIBRARY Highway_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libhwy-dev (apt) or Google Highway >= 1.0")

if(Highway_FOUND AND NOT TARGET Highway::hwy)
  add_library(Highway::hwy UNKNOWN IMPORTED)
  set_target_properties(Highway::hwy PROPERTIES
    IMPORTED_LOCATION "${Highway_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${Highway_INCLUDE_DIR}")
endif()
