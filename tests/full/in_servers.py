"""What tests/full/test_servers.py runs in the environment of the servers, where this package is not installed.

    python in_servers.py vllm|names|llama.cpp FILE

FILE has the work as JSON: see each function. The last line printed is its result as JSON.
"""
# pyright: reportMissingImports=false

import json
import os
import sys
from pathlib import Path
from typing import Any

CHECKED = 128  # tokens of a text at most


def run_vllm(work: dict[str, Any]) -> list[Any]:
    """`prompts` continued greedily by `tokens` tokens with each of `models`, pairs of a folder and a dtype."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM is imported once
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for folder, dtype in work["models"]:
        model = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=CHECKED)
        how = SamplingParams(temperature=0, max_tokens=work["tokens"], logprobs=1, ignore_eos=True)
        answers = []
        for answer in model.generate(work["prompts"], how, use_tqdm=False):
            ids = answer.outputs[0].token_ids
            nats = [one[i].logprob for one, i in zip(answer.outputs[0].logprobs, ids, strict=True)]
            answers.append({"prompt": len(answer.prompt_token_ids), "ids": list(ids), "logprobs": nats})
        found.append(answers)
        model.llm_engine.engine_core.shutdown()
        del model
        cleanup_dist_env_and_memory()
    return found


def read_names(work: dict[str, Any]) -> list[Any]:
    """For each of `folders`: the class of vLLM, its parameters without a weight, and the sums of squares of its
    parameters and of the files. It loads the weights with its own code, which refuses unknown names and other shapes.
    """
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.triton_utils import triton

    # Two faults of vLLM 0.32.0 with OLMo-Hybrid: without Triton its placeholder lacks a function, and the loader of
    # convolutions does not find out whether a weight is that of queries, keys or values.
    triton.set_allocator = lambda allocator: None
    loader_of = olmo._make_fused_conv1d_weight_loader

    def with_shard(*sizes: Any) -> Any:
        load = loader_of(*sizes)
        return lambda parameter, weight: load(parameter, weight, weight.shard_id)

    olmo._make_fused_conv1d_weight_loader = with_shard
    found = []
    for n, folder in enumerate(work["folders"]):
        config = EngineArgs(model=folder, dtype="float32", enforce_eager=True, max_model_len=CHECKED)
        config = config.create_engine_config()
        with set_current_vllm_config(config):
            if not n:
                store = f"file://{work['store']}"
                init_distributed_environment(1, 0, store, 0, backend="gloo")
                initialize_model_parallel(1)
            torch.set_default_dtype(torch.float32)
            model = initialize_model(config)
        files = load_file(Path(folder, "model.safetensors"))
        loaded = model.load_weights(iter(files.items()))
        own = dict(model.named_parameters())
        squares = [sum(x.double().square().sum().item() for x in one.values()) for one in (own, files)]
        found.append([type(model).__name__, sorted(own.keys() - loaded), *squares])
    return found


def run_llama_cpp(work: dict[str, Any]) -> list[Any]:
    """`prompts` continued as by `run_vllm` with each of `files`, in GGUF."""
    import xllamacpp

    found = []
    for file in work["files"]:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.warmup = file, CHECKED, False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server = xllamacpp.Server(params)
        answers = []
        for prompt in work["prompts"]:
            how = {"prompt": prompt, "n_predict": work["tokens"], "temperature": 0, "n_probs": 1, "ignore_eos": True}
            answer = server.handle_completions(how)
            tokens = answer["choices"][0]["logprobs"]["content"]
            ids, nats = ([one[name] for one in tokens] for name in ("id", "logprob"))
            answers.append({"prompt": answer["usage"]["prompt_tokens"], "ids": ids, "logprobs": nats})
        found.append(answers)
    return found


if __name__ == "__main__":
    run = {"vllm": run_vllm, "names": read_names, "llama.cpp": run_llama_cpp}[sys.argv[1]]
    print(json.dumps(run(json.loads(Path(sys.argv[2]).read_text()))))
