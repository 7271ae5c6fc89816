#!/usr/bin/env bash
# Threads at work on one file of rows, under ThreadSanitizer: by threads, and by io_uring where the system allows it.
#   tools/sanitize_threads.sh [SECONDS] [FOLDER]      30 of each, in build/
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-30}
folder=${2:-build}
mkdir -p build/sanitize "$folder"
g++ -std=c++20 -O1 -g -pthread -fsanitize=thread -Isrc/meseta -o build/sanitize/row_file_threads tools/row_file_threads.cpp
TSAN_OPTIONS=halt_on_error=1 build/sanitize/row_file_threads "$folder" "$seconds"
