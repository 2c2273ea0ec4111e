"""The plan's lines that no other test reads."""

from fadejax.config import default_config, resolve
from fadejax.data.records import Generated, Task, TaskConfig
from fadejax.train.plan import _task_line


def test_the_line_of_a_task_says_how_often_training_goes_through_its_problems():
  c = default_config()
  c.steps, c.rollout.prompts = 30, 8
  rows = [{"id": str(i)} for i in range(20)]
  listed = Task("listed", rows, rows[:5], {"rows over the limit": 2, "others": 0})
  endless = Task("endless", Generated(lambda i: {"id": str(i)}), rows[:7])
  tasks = [(TaskConfig(weight=3.0), listed), (TaskConfig(weight=1.0), endless)]
  # 30 × 8 draws, three quarters of them from 20 problems.
  assert _task_line(resolve(c), tasks, 0) == (
    "listed: 20 training problems, each drawn about 9 times; 5 evaluation problems; "
    "2 rows over the limit"
  )
  assert _task_line(resolve(c), tasks, 1) == "endless: 7 evaluation problems"
