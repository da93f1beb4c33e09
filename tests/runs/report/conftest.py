from tests.browser import browser as browser
from tests.browser import opened as opened
