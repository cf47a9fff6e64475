//! Staying and going: what a member tells of itself, of a source that it lost, and that it goes.

use super::{
    member::{Cause, MemberId},
    message::Answer,
    refusal::{Reason, Refusal},
    service::{MOST_ACCUSERS, Member, RETRY_MS, Service, millis, wait},
};

impl Service {
    /// A sign of life, with what came along.
    pub(super) fn heard(&mut self, id: MemberId, holds: u64, (upstream, epoch): (Option<MemberId>, u32)) {
        let (now, lease) = (self.now, self.rules.lease);
        // Only then it is believed whom it reads from. Whoever would read from one that reads from it keeps what is known of it.
        let newer = self.members.get(&id).is_some_and(|member| epoch > member.epoch);
        let adopted = upstream.filter(|up| newer && !self.is_above(id, *up));
        let Some(member) = self.members.get_mut(&id) else { return };
        let silent = member.silent();
        member.renewed = now;
        member.lease_until = now.saturating_add(lease);
        let before = (member.complete(), member.upstream);
        let holds = holds.min(member.said.content.bytes).max(member.said.holds);
        let (at, had) = member.reported;
        if holds > had {
            let micros = u64::try_from(now.saturating_sub(at).as_micros()).unwrap_or(u64::MAX);
            let rate = u128::from(holds - had) * 1_000_000 / u128::from(micros.max(1));
            member.rate = u64::try_from(rate).unwrap_or(u64::MAX);
            member.reported = (now, holds);
        }
        member.said.holds = holds;
        if newer {
            member.epoch = epoch;
            member.upstream = adopted;
        }
        if holds == member.said.content.bytes && holds > 0 {
            member.upstream = None;
        }
        if before != (member.complete(), member.upstream) {
            let (group, upstream) = (member.group, member.upstream);
            if let Some(source) = upstream {
                self.fed(source, id);
            }
            self.changed(group, |_| ());
            self.counted(id);
        }
        if silent || before.1 != self.members.get(&id).and_then(|m| m.upstream) {
            self.relink(id);
        }
    }

    pub(super) fn renew(
        &mut self,
        id: MemberId,
        secret: u64,
        holds: u64,
        reads: (Option<MemberId>, u32),
        membership: u64,
    ) -> Result<Answer, Refusal> {
        self.known(id, secret)?;
        self.heard(id, holds, reads);
        let lease_ms = millis(self.rules.lease);
        let blame = self.members.get(&id).map(Member::blame).unwrap_or_default();
        let source_ended = reads.0.is_some_and(|source| self.has_ended(source));
        let group = self.members.get(&id).and_then(|m| self.groups.get(&m.group));
        let news = group.is_some_and(|group| group.membership != membership);
        if !news {
            return Ok(Answer::Renewed { lease_ms, plan: None, readers: Vec::new(), blame, source_ended });
        }
        let (plan, readers) = (self.plan(id), self.readers(id));
        Ok(Answer::Renewed { lease_ms, plan, readers, blame, source_ended })
    }

    pub(super) fn lost(
        &mut self,
        id: MemberId,
        secret: u64,
        (source, epoch): (MemberId, u32),
        (cause, corrupt): (Cause, bool),
        holds: u64,
    ) -> Result<Answer, Refusal> {
        self.known(id, secret)?;
        self.heard(id, holds, (Some(source), epoch));
        let (now, rules) = (self.now, self.rules);
        let Some(member) = self.members.get_mut(&id) else { return Ok(wait(RETRY_MS, "a place")) };
        if member.epoch == epoch && member.upstream == Some(source) {
            member.upstream = None;
            let group = member.group;
            let mut until = now.saturating_add(rules.doubt);
            if let Some(source) = self.members.get_mut(&source) {
                if source.doubted_until.saturating_add(rules.flap_window) < now {
                    source.doubts = 0;
                }
                let turn = rules.doubt.saturating_mul(1 << source.doubts.min(6));
                source.doubts = source.doubts.saturating_add(1);
                source.doubted_at = now;
                source.doubted_until = now.saturating_add(turn);
                until = source.doubted_until;
                if corrupt && cause == Cause::Refused && source.accusers.len() < MOST_ACCUSERS {
                    source.accusers.insert(id);
                }
            }
            if let Some(member) = self.members.get_mut(&id) {
                let until = (cause == Cause::Lost).then_some(until);
                // What is refused stays refused; what is over is forgotten.
                member.avoid.retain(|_, until| until.is_none_or(|until| until > now));
                let kept = member.avoid.entry(source).or_insert(until);
                *kept = if kept.is_none() { None } else { until };
            }
            self.changed(group, |_| ());
            self.counted(id);
            self.relink(id);
            self.relink(source);
        }
        Ok(self.registered(id))
    }

    pub(super) fn leave(&mut self, id: MemberId, secret: u64) -> Result<Answer, Refusal> {
        match self.known(id, secret) {
            Ok(_) => {
                self.forget(id, false);
                self.bury(id);
                Ok(Answer::Done)
            }
            Err(refusal) if refusal.reason == Reason::GenerationTaken => Err(refusal),
            // Gone is gone.
            Err(_) => Ok(Answer::Done),
        }
    }
}
