//! What happens next: events in the order of their time, and of equal times in the order in which they were put in.

use std::{cmp::Ordering, collections::BinaryHeap};

#[derive(Debug, Clone, Copy)]
struct Entry<E> {
    at: u64,
    order: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    /// The heap's greatest is the earliest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// Events by time, in nanoseconds from the beginning.
#[derive(Debug, Clone)]
pub struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    order: u64,
    now: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), order: 0, now: 0 }
    }
}

impl<E> Queue<E> {
    /// The time of the last event taken out.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Puts an event in; one in the past happens now, so that time never goes back.
    pub fn push(&mut self, at: u64, event: E) {
        self.order += 1;
        self.heap.push(Entry { at: at.max(self.now), order: self.order, event });
    }

    /// Takes the next event out and goes to its time.
    pub fn pop(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }

    /// When the next event is.
    pub fn next_at(&self) -> Option<u64> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// How many events wait.
    pub fn waiting(&self) -> usize {
        self.heap.len()
    }

    /// How many events were put in so far.
    pub fn pushed(&self) -> u64 {
        self.order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_come_in_order_and_equals_as_they_went_in(times in prop::collection::vec(0u64..50, 0..60)) {
            let mut queue = Queue::default();
            for (n, at) in times.iter().enumerate() {
                queue.push(*at, n);
            }
            let mut expected: Vec<_> = times.iter().copied().zip(0..).collect();
            expected.sort();
            for (at, n) in expected {
                prop_assert_eq!(queue.pop(), Some(n));
                prop_assert_eq!(queue.now(), at);
            }
            prop_assert_eq!(queue.pop(), None);
        }
    }

    #[test]
    fn the_past_is_now() {
        let mut queue = Queue::default();
        queue.push(10, 'a');
        assert_eq!(queue.pop(), Some('a'));
        queue.push(3, 'b');
        assert_eq!((queue.pop(), queue.now()), (Some('b'), 10));
    }
}
