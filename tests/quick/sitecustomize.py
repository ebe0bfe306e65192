"""Every process of `make test` looks for garbage seldom: nearly all that it makes stays to its end,
when the system takes all memory back. To import torch and end costs a quarter less so."""

import atexit
import gc

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)  # the last one: whatever else is to be done at the end, is done
