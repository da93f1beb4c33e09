from tests.page.browser import browser as browser
from tests.page.browser import opened as opened
