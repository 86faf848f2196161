"""The names that stand at the top of both packages: each is there, and importing the package costs nothing."""

import subprocess
import sys

import pytest
import trieton
import trieton_builder


@pytest.mark.parametrize("package", [trieton, trieton_builder])
def test_every_public_name_leads_to_what_it_names(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = package.no_such_name


def test_importing_a_package_loads_nothing_until_a_name_is_used():
    code = "import sys, trieton, trieton_builder; print([n for n in ('numpy', 'torch', 'numba') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
