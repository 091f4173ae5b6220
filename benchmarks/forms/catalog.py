"""The compared models: the mixer of each layer, by name."""

from benchmarks.forms.mixers import Form

CONTROL_EVERY = 32

MEAN = Form(decay="learned")
FULL = MEAN.model_copy(update={"conv": True, "centred": True, "gate": "channel", "norm": True})
SLOTS = Form(channels=0, groups=2, slots=16, values=16, slot_decay="learned", gate="channel", norm=True)
# Fewer channels carry statistics, so that statistics, slots and convolutions together keep less than 8·C numbers.
MEMORY = FULL.model_copy(
    update={"channels": 60, **SLOTS.model_dump(include={"groups", "slots", "values", "slot_decay"})}
)
# The S layer of the product, tost_lm.model.slots: a state of 8·C numbers.
REMEMBERING = SLOTS.model_copy(update={"values": 28})
SOFTMAX = Form(mixer="softmax", conv=True)
WINDOW = SOFTMAX.model_copy(update={"window": 256})
LINEAR = Form(mixer="linear", conv=True, decay="input", slots=8, values=18)


def _with(form: Form, **changes: object) -> list[Form]:
    return [form.model_copy(update=changes)]


# One form for all layers, or a pattern that fills them.
CATALOG: dict[str, list[Form]] = {
    "published": [Form(share=True, positions=True)],
    "published-no-positions": [Form(share=True)],
    "decay-conv": _with(MEAN, conv=True),
    "slots": [REMEMBERING],
    "slots-2x16-16": _with(REMEMBERING, values=16),
    "slots-4x8": _with(REMEMBERING, groups=4, slots=8),
    "memory": [MEMORY],
    "memory-means": _with(MEMORY, means=True),
    "memory-copying": _with(MEMORY, copying=True),
    "memory-4-slots": _with(MEMORY, groups=4, slots=4, values=32, skip=True),
    "memory-4-slots-128": _with(MEMORY, groups=4, slots=4, values=32, skip=True, slot_half_life=128),
    "softmax": [SOFTMAX],
    "linear": [LINEAR],
    "hybrid": [REMEMBERING, REMEMBERING, REMEMBERING, WINDOW],
    # The hybrid of the product, whose softmax attention has no convolution.
    "hybrid-plain": [REMEMBERING, REMEMBERING, REMEMBERING, WINDOW.model_copy(update={"conv": False})],
}


def forms_of(name: str, layers: int) -> list[Form]:
    """The form of each layer. `NAME@control` is the same model without memory of more than CONTROL_EVERY tokens."""
    name, _, control = name.partition("@")
    forms = CATALOG[name]
    if layers < len(forms):  # two layers of a hybrid: its first form and its last
        forms = [*forms[: layers - 1], forms[-1]]
    forms = (forms * layers)[:layers]
    return [form.model_copy(update={"reset_every": CONTROL_EVERY}) for form in forms] if control else forms
