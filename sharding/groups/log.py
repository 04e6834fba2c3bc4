"""The log of groups, which raises nothing.

Filters and handlers of the log are the application's, and so is the text of an error that is shown.
What they raise would go to whoever logs, and end a task or a thread of a group that nobody waits
for: the group would stop in silence.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class CarefulLogger(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        options["stacklevel"] = options.get("stacklevel", 1) + 1  # who called is of interest
        try:
            self.logger.log(level, msg, *args, **options)
        except BaseException:
            with suppress(BaseException):  # perhaps without showing the error
                self.logger.log(level, msg, *args)


logger = CarefulLogger(logging.getLogger("warren.groups"), {})
