"""What to write here for what was written elsewhere: the tables of docs/migration, whose every line a test walks."""

from tests.support.migrations.deepspeed import DEEPSPEED
from tests.support.migrations.dion import DION, DION_NORMUON
from tests.support.migrations.keller_jordan import KELLER_JORDAN
from tests.support.migrations.moonlight import MOONLIGHT
from tests.support.migrations.motif import MOTIF
from tests.support.migrations.timm_muon import TIMM
from tests.support.migrations.torch_muon import TORCH
from tests.support.migrations.wrapper import WRAPPER

ORIGINS = {
    origin.name: origin
    for origin in (TORCH, TIMM, KELLER_JORDAN, MOONLIGHT, MOTIF, DION, DION_NORMUON, DEEPSPEED, WRAPPER)
}
