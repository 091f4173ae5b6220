from small_runs import make_model, run_folder, shards, tokenizer

__all__ = ["make_model", "run_folder", "shards", "tokenizer"]
