"""What Python does first in every process of `make test`: it is told to look for garbage seldom.
Nearly all lives to the process's end, and to import torch and end costs a quarter less then."""

import atexit
import gc

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)  # the last one: whatever else is to be done at the end, is done
