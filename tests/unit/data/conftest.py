from builds import built

__all__ = ["built"]
