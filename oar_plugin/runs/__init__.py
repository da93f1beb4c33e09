"""Launch, plan, evaluation, report, data, rewards and folders of training runs. The method and the hosts never import it."""
