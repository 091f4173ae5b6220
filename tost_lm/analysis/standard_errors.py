"""Standard errors over documents. Shapes: N sequences, K documents."""

from torch import Tensor


def standard_error(values: Tensor, documents_N: Tensor) -> Tensor | None:
    """Cluster-robust standard error of the mean of `values` [N, …] over sequences; a cluster is a document.

    Deviations of one document are summed before they are squared, with the factor K/(K − 1). The result equals s/√N
    where each sequence has a document of its own. It is None where all sequences come from one document.
    """
    number_N = documents_N.unique(return_inverse=True)[1].to(values.device)
    documents = int(number_N.max()) + 1
    if documents < 2:
        return None
    deviations = values - values.mean(0)
    sums = deviations.new_zeros(documents, *deviations.shape[1:]).index_add(0, number_N, deviations)
    return (sums.square().sum(0) * documents / (documents - 1)).sqrt() / len(values)
