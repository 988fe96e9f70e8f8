# The Python module deep_ep._core: one binding file a buffer in src/python.
file(GLOB python_sources CONFIGURE_DEPENDS src/python/*.cpp)
if(NOT python_sources)
  message(STATUS "src/python has no sources: deep_ep._core is not built")
  return()
endif()

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
# nanobind is a Python package: ask the interpreter where it is, afresh each time, because an
# isolated pip build moves it.
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_dir COMMAND_ERROR_IS_FATAL ANY)
set(nanobind_DIR "${nanobind_dir}" CACHE PATH "where nanobind-config.cmake is" FORCE)
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_core NB_STATIC NB_SUPPRESS_WARNINGS ${python_sources})
deep_ep_target_options(_core)
target_include_directories(_core PRIVATE src)
target_link_libraries(_core PRIVATE deep_ep::deep_ep)
# Another extension in the same process may hold its own copy of this library.
target_link_options(_core PRIVATE LINKER:--exclude-libs,ALL)
install(TARGETS _core LIBRARY DESTINATION deep_ep COMPONENT python)

nanobind_add_stub(_core_stub MODULE _core OUTPUT _core.pyi DEPENDS _core
                  PYTHON_PATH $<TARGET_FILE_DIR:_core>)
install(FILES ${PROJECT_BINARY_DIR}/_core.pyi DESTINATION deep_ep COMPONENT python)
