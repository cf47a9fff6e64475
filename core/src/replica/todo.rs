//! The chunks of one shard that are still to be pulled, by number.

use std::collections::BTreeSet;

/// In order: those that came back, then all from `next` on. Every one that came back was given out before, so it is below `next`.
#[derive(Debug)]
pub(super) struct Todo {
    next: u64,
    end: u64,
    back: BTreeSet<u64>,
}

impl Todo {
    /// All of `chunks`.
    pub(super) fn new(chunks: u64) -> Self {
        Self { next: 0, end: chunks, back: BTreeSet::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first().is_none()
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.back.first().copied().or((self.next < self.end).then_some(self.next))
    }

    /// Gives the first out.
    pub(super) fn take_first(&mut self) -> Option<u64> {
        self.back.pop_first().or_else(|| {
            let first = (self.next < self.end).then_some(self.next)?;
            self.next += 1;
            Some(first)
        })
    }

    /// Takes back what was given out.
    pub(super) fn put_back(&mut self, chunk: u64) {
        if chunk < self.next {
            self.back.insert(chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_left_comes_in_order_and_once(
            chunks in 0u64..12,
            steps in prop::collection::vec(prop::option::of(any::<prop::sample::Index>()), 0..40),
        ) {
            let mut todo = Todo::new(chunks);
            let mut left: BTreeSet<u64> = (0..chunks).collect();
            let mut out = Vec::new();
            for step in steps {
                prop_assert_eq!((todo.first(), todo.is_empty()), (left.first().copied(), left.is_empty()));
                match step {
                    Some(which) if !out.is_empty() => {
                        let chunk = out.swap_remove(which.index(out.len()));
                        todo.put_back(chunk);
                        left.insert(chunk);
                    }
                    _ => {
                        let given = todo.take_first();
                        prop_assert_eq!(given, left.pop_first());
                        out.extend(given);
                    }
                }
            }
        }
    }
}
