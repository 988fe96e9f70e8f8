# find_package(deep_ep): the target deep_ep::deep_ep and what it links.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
find_dependency(Highway)
list(POP_FRONT CMAKE_MODULE_PATH)
include("${CMAKE_CURRENT_LIST_DIR}/deep_ep-targets.cmake")
