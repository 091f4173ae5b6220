"""Standard errors over documents. Shapes: N sequences, K documents."""

from torch import Tensor


def standard_error(values: Tensor, documents_N: Tensor) -> Tensor | None:
    """Of the mean of values [N, …] over sequences, of which those of one document may be alike: their deviations are
    summed before they are squared. None where all are of one document.

    The usual s/√N where each is of its own (cluster-robust, with the factor K/(K − 1)).
    """
    number_N = documents_N.unique(return_inverse=True)[1].to(values.device)
    documents = int(number_N.max()) + 1
    if documents < 2:
        return None
    aside = values - values.mean(0)
    sums = aside.new_zeros(documents, *aside.shape[1:]).index_add(0, number_N, aside)
    return (sums.square().sum(0) * documents / (documents - 1)).sqrt() / len(values)
