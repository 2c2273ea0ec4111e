"""The paper: policy weights, FADE's schedule, losses and pass@k, as pure functions of arrays.

Nothing here knows a device, a file, a model or a text.
"""
