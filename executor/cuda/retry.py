"""A second attempt at work for which the device had too little memory."""

import logging
from collections.abc import Callable
from typing import TypeVar

from executor.cuda.accelerator import Accelerator
from executor.device.device_memory import is_out_of_memory

_log = logging.getLogger(__name__)

R = TypeVar("R")


def with_room(accelerator: Accelerator, work: Callable[[], R], again: Callable[[], R] | None = None) -> R:
    """Returns the result of work. If that runs out of memory, gives cached memory back and tries once more.

    `again` takes the place of work in the second attempt. Both must be repeatable. In a step, two parts are: the copy
    to the device, which changes nothing that exists, and the model, which writes the same keys and values to the same
    places each time. The others are not, because they read what they write: branches in `DeviceSlots.apply`, forks,
    and `close_rows`. If a step runs out of memory there, it fails, and its epoch with it.
    """
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("a step is out of memory and is tried again: %s", str(error).splitlines()[0])
    # The error is gone here, and with it the temporaries that its traceback keeps alive.
    accelerator.release()
    return (again or work)()
