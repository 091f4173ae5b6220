"""A model on tensor × sequence ranks, called as on one: whole tokens in, whole logits out, on every rank alike."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from tost_lm.model.checkpoint import load
from tost_lm.model.lm import LMOutput, LMState, TostLM
from tost_lm.parallel.apply import even_split, parallelize
from tost_lm.parallel.collectives import all_gather
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.sequence import RankShard


def load_on_ranks(checkpoint: Path, mesh: Mesh) -> "WholeModel":
    """The model of a checkpoint spread over the ranks of a mesh, in evaluation mode; all of them call it.

    Raises:
        CheckpointError: as `tost_lm.load`.
        ConfigError: heads or vocabulary cannot be shared out evenly.
    """
    model = parallelize(load(checkpoint), mesh)  # on the host, where the whole model fits
    return WholeModel(model.to(mesh.device), mesh).eval()


class WholeModel(nn.Module):
    """A model that `parallelize` has spread over a mesh, called like `TostLM`; for inference.

    All ranks call it with the same arguments and get the same logits, to the bit. Its state is whole, too, but for the
    heads: of those, a tensor rank has its own.
    """

    def __init__(self, model: TostLM, mesh: Mesh):
        super().__init__()
        self.config = model.config
        self.model, self.mesh = model, mesh

    def forward(
        self,
        tokens_BT: Tensor,
        labels: Tensor | None = None,
        state: LMState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LMOutput:
        """Read whole sequences, as `TostLM` does: each sequence rank its part of the tokens.

        Fewer tokens than sequence ranks, such as one in decoding, are read by all of them alike.

        Args:
            tokens_BT: ids, int64, all of them on every rank.
            labels: [B, T], as in `TostLM`.
            state: of an earlier call.
            cu_seqlens: int32 [N + 1], offsets of packed documents in all tokens.

        Returns:
            Logits [B, T, V] and, with labels, nats [B, T], and the state after the last token; no loss.

        Raises:
            ConfigError, ValueError: as `TostLM`.
        """
        ranks = self.mesh.sequence
        if ranks.size == 1:
            return self.model(tokens_BT, labels, state, cu_seqlens)._replace(loss=None)
        if tokens_BT.shape[1] < ranks.size:
            output: LMOutput = self.model(tokens_BT, labels, state, cu_seqlens)
            # One rank's, since rounding may differ between them, and the choice of a token must not.
            return _joined(output, lambda x_BTX: all_gather(x_BTX, ranks)()[0])
        split = even_split(self.mesh, tokens_BT.shape[1])
        shard = RankShard(ranks, split)
        here = None if labels is None else split.shard(labels)
        output = self.model(split.shard(tokens_BT), here, state, cu_seqlens, shard=shard)
        return _joined(output, lambda x_BTX: shard.gather(x_BTX[:, None])[:, 0])


def _joined(output: LMOutput, join: Callable[[Tensor], Tensor]) -> LMOutput:
    nats_BT, is_top_BT = (None if x is None else join(x[..., None])[..., 0] for x in (output.nats, output.is_top))
    return output._replace(loss=None, nats=nats_BT, is_top=is_top_BT, read_logits=lambda: join(output.logits))
