#!/usr/bin/env bash
# Runs ci/gpu/tune.py on a GPU host that reaches no network: tune.sh PART OUT [NAMES...], PART a directory with FlashInfer's parts (as
# packed for the host), kcache's wheel, a store of modules, build manifests and, for cuTile, pieces of its compiler.
#   PART/part-1, PART/unpack, PART/*.whl, PART/store, PART/*.toml, PART/tile.*
# A later PART without FlashInfer adds to what an earlier one left on the same machine.
set -u
here=$(cd "$1" && pwd); out=$(realpath "$2"); shift 2; top=${TOP:-/tmp/i5b}; site=$top/site; py=${PY:-python3}; mkdir -p "$top" "$out"
if [ -d "$here/part-1" ]; then
  /usr/bin/timeout 100 "$py" "$here/unpack" "$site" "$here/part-1" || exit 1
  for wheel in "$here"/*.whl; do "$py" -m zipfile -e "$wheel" "$site"; done
  cp -r "$here/store" "$here/gpu" "$top/"
fi
cp "$here"/tile.* "$top/" 2>/dev/null
if [ -f "$top/tile.02" ] && [ ! -x "$top/tile/bin/tileiras" ]; then
  mkdir -p "$top/tile"; cat "$top"/tile.0* | "$py" -c 'import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1])' "$top/tile"
fi
# tileiras takes libnvvm and ptxas of CUDA_HOME before its own, and those of another CUDA release cannot compile what it makes.
[ -d "$top/tile/bin" ] && export PATH=$top/tile/bin:$PATH && unset CUDA_HOME CUDA_PATH
export SITE=$site PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
nvidia-smi -L; echo "unpacked after $SECONDS s"
/usr/bin/timeout "${LIMIT:-540}" "$py" "$top/gpu/tune.py" "$top/store" "$out" "$top/work" "${@/#/$here/}"; echo "rc $? after $SECONDS s"
