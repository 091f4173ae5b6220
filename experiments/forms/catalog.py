"""The compared models: the mixer of each layer, by name."""

from experiments.forms.mixers import Form

SLOTS = Form(mixer="slots", values=28)  # the layer of experiments/slots.py with two heads
DELTA = Form(mixer="delta")
SOFTMAX = Form(mixer="softmax", heads=4)
CATALOG: dict[str, list[Form]] = {
    "slots": [SLOTS],
    "overwriting": [Form(mixer="overwriting")],
    "delta": [DELTA],
    "mamba2": [Form(mixer="mamba2")],
    "hgrn2": [Form(mixer="hgrn2")],
    "softmax": [SOFTMAX],
    "hybrid": [SLOTS, SLOTS, SLOTS, SOFTMAX.model_copy(update={"window": 256})],
    "full-hybrid": [SLOTS, SLOTS, SLOTS, SOFTMAX],
    "full-hybrid-no-rotary": [SLOTS, SLOTS, SLOTS, SOFTMAX.model_copy(update={"rotary": False})],
    "delta-full-hybrid": [DELTA, DELTA, DELTA, SOFTMAX],
    "slots-window": [SLOTS.model_copy(update={"window": 32})],
}
"""One form for all layers, or a pattern that fills them. `slots-window` is a control without long memory."""
FULL_HYBRIDS = ("full-hybrid", "full-hybrid-no-rotary", "delta-full-hybrid")
"""They are compared with `hybrid`, whose softmax layer has a window."""
CONSTANT = ("slots", "overwriting", "delta", "mamba2", "hgrn2")
"""Those whose state has at most 8·C numbers a layer."""


def forms_of(name: str, layers: int, state: int = 1) -> list[Form]:
    """The form of each layer, with `state` times as many keys or slots."""
    forms = CATALOG[name]
    if layers < len(forms):  # two layers of a hybrid: its first form and its last
        forms = [*forms[: layers - 1], forms[-1]]
    return [form.model_copy(update={"keys": state * form.keys}) for form in (forms * layers)[:layers]]
