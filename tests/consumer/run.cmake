# Installs BUILD to a fresh prefix, builds the projects of SOURCE against it
# and runs them.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out
                                                       ERROR_VARIABLE out)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nfailed (${code}):\n${out}")
  endif()
endfunction()

function(build_and_run source build)
  run(${CMAKE_COMMAND} -S ${source} -B ${build} -G Ninja
      -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix
      -DCMAKE_C_FLAGS=${FLAGS} -DCMAKE_CXX_FLAGS=${FLAGS})
  run(${CMAKE_COMMAND} --build ${build})
  run(${build}/consumer ${WORK}/filters.npz)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
build_and_run(${SOURCE} ${WORK}/build)
build_and_run(${SOURCE}/c ${WORK}/build_c)
