"""Weight groups: invite actors, assign ranks, join, and find who is to blame if that fails."""

from collections.abc import Callable, Mapping

from capo.learner.weight_answers import GRACE_S, Answers, Group
from capo.learner.weight_background import Background
from capo.learner.weight_transfer import WeightTransport
from capo.protocol.messages import GroupForm, GroupFormed, GroupInvite


class GroupFormer:
    """Blocks in `group_of` for at most about twice `timeout_s`."""

    def __init__(
        self,
        send: Callable[[str, GroupInvite | GroupForm], None],
        transport: WeightTransport,
        answers: Answers,
        timeout_s: float,
    ) -> None:
        self._send = send
        self._transport = transport
        self._answers = answers
        self._timeout_s = timeout_s

    def group_of(self, members: tuple[str, ...]) -> tuple[Group | None, dict[str, str]]:
        """A group of these members, or None and who is to blame for that."""
        answers = self._answers
        with answers.changed:
            group = answers.group
            if group is not None and set(group.members) == set(members):
                answers.reports.clear()
                return group, {}
            epoch = answers.next_epoch()
        for actor in members:
            self._send(actor, GroupInvite(epoch=epoch))
        timeout_s = self._timeout_s
        answers.ask("to accept the weight group", members, answers.accepted)
        answers.wait(
            lambda: all(a in answers.accepted or a in answers.lost for a in members), timeout_s
        )
        with answers.changed:
            missing = {
                actor: answers.lost.get(
                    actor, f"did not answer the invitation to the weight group in {timeout_s:g} s"
                )
                for actor in members
                if actor not in answers.accepted or actor in answers.lost
            }
            workers = {actor: accept.workers for actor, accept in answers.accepted.items()}
        present = tuple(actor for actor in members if actor not in missing)
        if not present:
            return None, missing
        group, failed = self._form(epoch, present, workers)
        return group, missing | failed

    def _form(
        self, epoch: int, members: tuple[str, ...], workers: Mapping[str, int]
    ) -> tuple[Group | None, dict[str, str]]:
        ranks: dict[str, int] = {}
        world_size = 1
        for actor in members:
            ranks[actor] = world_size
            world_size += workers[actor]
        timeout_s = self._timeout_s
        host, port = self._transport.endpoint()
        for actor in members:
            form = GroupForm(
                epoch=epoch,
                transport=self._transport.name,
                host=host,
                port=port,
                rank=ranks[actor],
                world_size=world_size,
                timeout_s=timeout_s,
            )
            self._send(actor, form)
        answers = self._answers
        own = answers.start(lambda: self._transport.form(epoch, world_size, timeout_s))
        answers.ask("to join the weight group", members, answers.formed)
        answers.wait(
            lambda: (
                any(actor in answers.lost for actor in members)
                or any(formed.error for formed in answers.formed.values())
                or (own.done and all(actor in answers.formed for actor in members))
            ),
            timeout_s + GRACE_S,
        )
        with answers.changed:
            lost = answers.lost_of(members)
            formed = dict(answers.formed)
        stands = all(actor in formed and not formed[actor].error for actor in members)
        if own.done and not own.error and stands and not lost:
            group = Group(epoch, members)
            with answers.changed:
                answers.group = group
            return group, {}
        failed = self._to_blame(epoch, ranks, lost, formed, own)
        self._transport.abort()
        return None, failed

    def _to_blame(
        self,
        epoch: int,
        ranks: Mapping[str, int],
        lost: dict[str, str],
        formed: Mapping[str, GroupFormed],
        own: Background,
    ) -> dict[str, str]:
        """Why no group was formed, by member: those known to be the cause, or else all of them."""
        complaints = {a: formed[a].error for a in ranks if a in formed and formed[a].error}
        failed = lost | {a: f.error for a, f in formed.items() if not f.reached and a in ranks}
        if failed:
            return failed
        timeout_s = self._timeout_s
        late = f"did not come to the weight group within {timeout_s:g} s"
        silent = [a for a in ranks if not self._transport.arrived(epoch, ranks[a])]
        if silent:
            return {actor: complaints.get(actor, late) for actor in silent}
        return complaints or dict.fromkeys(
            ranks, own.error or "the weight group was not formed in time"
        )
