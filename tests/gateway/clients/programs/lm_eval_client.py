"""The package `lm-eval`: one task, through /v1/completions and on its own `hf` backend.

It prints the accuracies, and the log-likelihood of each choice of each document.
"""

import json
import logging
import os
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

logging.disable(logging.WARNING)
ADDRESS, CHECKPOINT, TASKS, MODEL = (os.environ[name] for name in ("GATEWAY", "CHECKPOINT", "TASKS", "MODEL"))
BACKENDS = {
    "local-completions": {
        "model": MODEL,
        "base_url": f"http://{ADDRESS}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": CHECKPOINT,
        "num_concurrent": 4,
        "batch_size": 16,
    },
    "local-completions, remote tokenizer": {
        "model": MODEL,
        "base_url": f"http://{ADDRESS}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
        "batch_size": 16,
    },
    "hf": {"pretrained": CHECKPOINT, "dtype": "float32", "device": "cpu", "batch_size": 16, "add_bos_token": False},
}


def evaluated(backend: str) -> dict[str, Any]:
    found = simple_evaluate(
        model=backend.split(",")[0],
        model_args=BACKENDS[backend],
        tasks=["stories"],
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(found["samples"]["stories"], key=lambda sample: sample["doc_id"])
    result = found["results"]["stories"]
    return {
        "backend": backend,
        "accuracies": {name: value for name, value in result.items() if name in ("acc,none", "acc_norm,none")},
        "log_likelihoods": [[float(pair[0]) for pair in sample["filtered_resps"]] for sample in samples],
    }


for each in BACKENDS:
    print(json.dumps(evaluated(each)), flush=True)
