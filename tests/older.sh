#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# tests/older with the libraries of two years ago (November 2024), in an environment of their own in build/older: they
# stand before those of .venv, which has torch and all else. bitsandbytes of that time needs a GPU: not among them.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$PWD/build/older
libraries=(
  transformers==4.46.3 tokenizers==0.20.3 diffusers==0.31.0 huggingface_hub==0.26.2 accelerate==1.1.1
  sentence-transformers==3.3.1 safetensors==0.4.5
)
if [[ $(cat "$venv/made-of" 2>/dev/null) != "${libraries[*]}" ]]; then
  rm -rf "$venv"
  .venv/bin/python -m venv "$venv"
  "$venv/bin/pip" install -q --no-deps "${libraries[@]}"
  base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  place=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$base')" >"$place/zz_base.pth"
  echo "${libraries[*]}" >"$venv/made-of"
fi
"$venv/bin/python" -c '
import diffusers, torch, transformers
print("older versions: transformers", transformers.__version__, "diffusers", diffusers.__version__, "torch", torch.__version__)'
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/older "$@"
