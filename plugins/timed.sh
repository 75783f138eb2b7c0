#!/bin/sh
# Runs a compiler command and prints how long it took and what it made. CMake puts it before each
# compilation (RULE_LAUNCH_COMPILE).
start=$(date +%s%N)
"$@"
status=$?
output='?'
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
end=$(date +%s%N)
printf '%6d ms  %s\n' $(((end - start) / 1000000)) "${output#*.dir/}"
exit $status
