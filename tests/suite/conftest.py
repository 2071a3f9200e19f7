"""What every target must do."""

from tests import targets

pytest_generate_tests = targets.each_of(targets.ALL)
