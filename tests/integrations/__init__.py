"""Muon in the libraries that others train with: the real ones, of requirements/integrations.txt.

Each file is about one library: its name is that of the installed package, the first line of its docstring says how the
library is called, and what lies between `# <use>` and `# </use>` is what docs/libraries.md shows, and runs here.
"""

from tests.support.torchvision_operators import declare_missing

declare_missing()
