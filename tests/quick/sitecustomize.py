"""What Python does first in every process of `make test`: it is told to look for garbage seldom.

Nearly all that a process makes stays to its end, and at its end the system takes all memory back.
To import torch and end costs a quarter less then, and hundreds of processes do that.
"""

import atexit
import gc

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)  # the last one: whatever else is to be done at the end, is done
