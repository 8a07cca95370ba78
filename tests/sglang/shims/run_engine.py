"""Run one Engine over a list of prompts, one at a time: the job as JSON on stdin, the answers on stdout.

Job: {"engine": {Engine's arguments}, "prompts": [[token ids], ...], "output_tokens": n}. Each answer is
{"output": [token ids], "cached": tokens}. The last line of stdout is the JSON; others are the Engine's.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    import sglang

    engine = sglang.Engine(**job["engine"])
    sampling = {"max_new_tokens": job["output_tokens"], "temperature": 0, "ignore_eos": True}
    answers = []
    for prompt in job["prompts"]:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        answers.append({"output": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]})
    engine.shutdown()
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":  # the Engine starts its processes by importing this file again
    main()
