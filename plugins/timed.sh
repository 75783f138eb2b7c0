#!/bin/sh
# Runs a compiler command and prints how long it took, what it made and, for CUDA, how many kernels
# were instantiated there. CMake puts it before each compilation (RULE_LAUNCH_COMPILE).
start=$(date +%s%N)
"$@"
status=$?
output='?'
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
end=$(date +%s%N)
case $output in
  # nvcc writes one guard variable for each kernel that the host can launch
  *.cu.o) kernels=", $(nm "$output" 2>/dev/null | grep -c '_ZGV.*__device_stub__') kernels" ;;
  *) kernels= ;;
esac
printf '%6d ms  %s%s\n' $(((end - start) / 1000000)) "${output#*.dir/}" "$kernels"
exit $status
