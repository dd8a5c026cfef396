# How our own code is compiled. -ffp-contract=off: every fused multiply-add is written out, or results would differ between compilers.
add_library(shardow_options INTERFACE)
target_compile_options(shardow_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off -fvisibility=hidden>)
if(CMAKE_UNITY_BUILD)  # what two files call alike is no mistake
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-shadow>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 takes `"." + text` for an overlapping copy (its bug 105651).
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(SHARDOW_WERROR)
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# Undefined behaviour is looked for in the engine and the command alone: those checks take longer to compile than all else, and tests are many.
# Null pointers fault by themselves, and nothing casts down to classes with virtual functions.
set(SHARDOW_ENGINE_OPTIONS "")
if(SHARDOW_SANITIZE)
  string(REPLACE "," ";" sanitizers "${SHARDOW_SANITIZE}")
  if("undefined" IN_LIST sanitizers)
    list(REMOVE_ITEM sanitizers undefined)
    set(SHARDOW_ENGINE_OPTIONS -fsanitize=undefined -fno-sanitize=null,vptr -fno-sanitize-recover=all)
  endif()
  foreach(sanitizer IN LISTS sanitizers)
    target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizer}>)
  endforeach()
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(shardow_options INTERFACE -fsanitize=${SHARDOW_SANITIZE})
endif()
