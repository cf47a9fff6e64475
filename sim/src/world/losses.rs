//! Deaths, and whom the readers of the dead go on at.

use super::{Event, HopId, Id, World, commands::gone, nanos};
use crate::{
    Error,
    placement::{Found, Placement},
};
use flashboot_core::{PeerId, replica::Event as Told};
use std::time::Duration;

/// A member asks again at least so often, however long the service told it to wait: as the real one.
const LONGEST: Duration = Duration::from_millis(500);

impl World<'_> {
    /// Every GPU of `clone` is gone.
    pub(super) fn dies(&mut self, clone: u32) {
        self.dead.push(clone);
        let ids: Vec<Id> =
            (0..).zip(&self.members).filter(|(_, m)| m.clone == Some(clone)).map(|(id, _)| id).collect();
        for id in ids {
            self.ends_member(id);
        }
    }

    fn ends_member(&mut self, id: Id) {
        let Some(node) = self.node(id) else { return };
        node.watch = None;
        let hops = node.hops.clone();
        if node.machine.take().is_some() {
            self.left -= 1;
        }
        for hop in hops {
            self.break_copies(id, hop);
            if let Some(flow) = self.hop(hop).map(|hop| hop.flow) {
                self.fabric.end(flow);
            }
        }
        self.leaves(id);
    }

    /// Nothing can be read from `id` any more, as its readers will notice.
    pub(super) fn leaves(&mut self, id: Id) {
        let now = self.queue.now();
        let Some(node) = self.node(id) else { return };
        node.alive = false;
        for hop in std::mem::take(&mut node.readers) {
            let Some(h) = self.hops.get_mut(hop as usize) else { continue };
            h.reads = false;
            let (reader, flow, detect) = (h.reader, h.flow, h.detect);
            self.fabric.end(flow);
            self.break_copies(reader, hop);
            self.queue.push(now + detect, Event::Noticed(hop));
        }
    }

    pub(super) fn noticed(&mut self, hop: HopId) {
        let Some(hop) = self.hop(hop).copied() else { return };
        if hop.attached {
            let source = PeerId(u64::from(hop.source));
            self.told.push_back((hop.reader, Told::Lost { source, cause: gone() }));
        }
    }

    /// `id` asks for another source than `lost`, and has its answer a question later.
    pub(super) fn seeks(&mut self, id: Id, lost: Id) {
        let now = self.queue.now();
        let question = nanos(self.profile.service.question_ms * 1e3);
        let Some(node) = self.node(id) else { return };
        node.seeks.push_back((lost, now));
        self.queue.push(now + question, Event::Asks(id));
    }

    pub(super) fn asks(&mut self, id: Id) -> Result<(), Error> {
        let now = self.queue.now();
        let Some(node) = self.node(id).filter(|node| node.machine.is_some()) else { return Ok(()) };
        let Some((lost, since)) = node.seeks.pop_front() else { return Ok(()) };
        // Of a gather nobody else is known to have a part.
        let one = self.geometry.shards() == 1;
        let found = if one { self.replacement(id, lost)? } else { Found::Nobody };
        let patience = nanos(self.profile.service.patience_ms * 1e3);
        if let Found::Later(wait) = found
            && now.saturating_sub(since) < patience
        {
            let wait = u64::try_from(wait.min(LONGEST).as_nanos()).unwrap_or(u64::MAX);
            if let Some(node) = self.node(id) {
                node.seeks.push_back((lost, since));
            }
            let question = nanos(self.profile.service.question_ms * 1e3);
            self.queue.push(now.saturating_add(wait).saturating_add(question), Event::Asks(id));
            return Ok(());
        }
        let to = match found {
            Found::Source(id) => Some(PeerId(u64::from(id))),
            Found::Later(_) | Found::Nobody => None,
        };
        self.moves += u64::from(to.is_some());
        self.told.push_back((id, Told::Reassigned { lost: PeerId(u64::from(lost)), source: to }));
        Ok(())
    }

    fn replacement(&mut self, id: Id, lost: Id) -> Result<Found, Error> {
        let now = self.now();
        let holds = self.nodes.get(id as usize).map_or(0, |node| node.words.iter().sum());
        let mut placement = match self.placement.take() {
            Some(placement) => placement,
            None => self.census()?,
        };
        let alive = (0..).zip(&self.nodes).filter(|(_, node)| node.alive && node.machine.is_some());
        placement.renews(now, alive.map(|(id, node)| (id, node.words.iter().sum())))?;
        let found = placement.lost(now, id, lost, holds)?;
        self.placement = Some(placement);
        Ok(found)
    }

    /// The service as it stands when somebody first asks it: everybody has come, and reads from whom they read.
    fn census(&self) -> Result<Placement, Error> {
        let mut placement = Placement::new(self.geometry.payload());
        for ((id, member), node) in (0..).zip(&self.members).zip(&self.nodes) {
            let last = node.hops.last().and_then(|hop| self.hop(*hop)).map(|hop| hop.source);
            let holds = node.words.iter().sum();
            placement.is_there(id, member, self.site.place(member.gpu), (last, holds))?;
        }
        Ok(placement)
    }
}
