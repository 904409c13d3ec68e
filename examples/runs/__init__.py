"""What a training program needs besides the training; nothing here knows of models.

* `config`: the options that every program has; `optimizer`: what they describe.
* `devices`: data parallelism; `mesh`: that, FSDP and tensor parallelism, together;
  `processes`: one run on several machines.
* `recorder`: called from the training loop: metrics, checkpoints, speed.
* `folder`, `checkpoint`: the files that a run leaves behind and continues from;
  `bad_steps`: what it keeps of steps that were skipped.
* `display`, `plot`: progress, table and picture.
* `command`: the program around it, which Ctrl-C may interrupt.
"""

from .bad_steps import BadStep as BadStep, read_bad_steps as read_bad_steps
from .command import (
    Stop as Stop,
    blame_all as blame_all,
    main as main,
    train_all as train_all,
)
from .config import (
    RunConfig as RunConfig,
    ScalingConfig as ScalingConfig,
    parse_options as parse_options,
    require as require,
)
from .devices import (
    data_mesh as data_mesh,
    divided as divided,
    replicated as replicated,
    require_divisible as require_divisible,
)
from .display import Display as Display, Labels as Labels
from .errors import SetupError as SetupError
from .folder import Result as Result, Row as Row, RunFolder as RunFolder
from .mesh import (
    MeshConfig as MeshConfig,
    make_mesh as make_mesh,
    pin as pin,
    pin_by_name as pin_by_name,
    put as put,
)
from .optimizer import make_adamw as make_adamw
from .recorder import (
    Interrupted as Interrupted,
    Metrics as Metrics,
    Recorder as Recorder,
    Score as Score,
    metrics_of as metrics_of,
)
