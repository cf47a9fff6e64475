//! Deaths, and whom the readers of the dead go on at.

use super::{Event, HopId, Id, World, commands::gone};
use crate::{Error, placement::Placement};
use flashboot_core::{PeerId, replica::Event as Told};

/// A question of the service's and its answer, in nanoseconds.
const QUESTION: u64 = 1_000_000;
/// How soon a member asks again that was told to wait, as the service says it.
const AGAIN: u64 = 50_000_000;
/// How often it does.
const TIMES: u16 = 200;

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

    /// `id` asks for another source than `lost`, for the first time (`times` = 0) or again.
    pub(super) fn asks(&mut self, id: Id, lost: Id, times: u16) -> Result<(), Error> {
        if !self.nodes.get(id as usize).is_some_and(|node| node.machine.is_some()) {
            return Ok(());
        }
        if times == 0 {
            self.queue.push(self.queue.now() + QUESTION, Event::Asks(id, lost, 1));
            return Ok(());
        }
        let source = PeerId(u64::from(lost));
        // Of a gather nobody else is known to have a part.
        let one = self.geometry.shards() == 1;
        let found = if one { self.replacement(id, lost)? } else { None };
        if found.is_none() && one && times < TIMES {
            self.queue.push(self.queue.now() + AGAIN, Event::Asks(id, lost, times + 1));
            return Ok(());
        }
        self.moves += u64::from(found.is_some());
        let to = found.map(|id| PeerId(u64::from(id)));
        self.told.push_back((id, Told::Reassigned { lost: source, source: to }));
        Ok(())
    }

    fn replacement(&mut self, id: Id, lost: Id) -> Result<Option<Id>, Error> {
        let now = self.now();
        let holds = self.nodes.get(id as usize).map_or(0, |node| node.words.iter().sum());
        let mut placement = match self.placement.take() {
            Some(placement) => placement,
            None => self.census()?,
        };
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
