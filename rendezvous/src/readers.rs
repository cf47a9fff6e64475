//! Who reads from a member, as spans in its own log: each carries the trace that its reader named, so that what a source and
//! its readers log can be put together.
//!
//! The service tells; it may tell late, twice, or of one that has ended by then.

use crate::protocol::{MemberId, Reader};
use std::collections::BTreeMap;
use tracing::{Span, field, info, info_span};

/// Open spans by reader.
#[derive(Debug, Default)]
pub(crate) struct Readers(BTreeMap<MemberId, Option<Span>>);

impl Readers {
    /// How many of them read, as far as is known.
    pub(crate) fn reading(&self) -> usize {
        self.0.values().flatten().count()
    }

    /// Takes what the service says: all that it remembers.
    pub(crate) fn take(&mut self, told: &[Reader]) {
        for Reader { member, trace, reads } in told {
            let known = self.0.contains_key(member);
            let open = self.0.entry(*member).or_default();
            // One that is met again after it had ended reads again.
            if !known || *reads && open.is_none() {
                let span = info_span!("serve", reader = %member, trace = field::Empty);
                if let Some(trace) = trace {
                    span.record("trace", field::display(trace));
                }
                span.in_scope(|| info!("it reads from here"));
                *open = Some(span);
            }
            if !reads && let Some(span) = open.take() {
                span.in_scope(|| info!("it reads no more"));
            }
        }
        self.0.retain(|member, _| told.iter().any(|reader| reader.member == *member));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::Generation;

    fn reader(word: u64, reads: bool) -> Reader {
        Reader { member: MemberId(Generation::from_random(word)), trace: Some("ab".into()), reads }
    }

    #[test]
    fn a_span_is_open_as_long_as_its_reader_reads() {
        let mut readers = Readers::default();
        readers.take(&[reader(1, true), reader(2, true)]);
        readers.take(&[reader(1, true), reader(2, true)]);
        assert_eq!(readers.reading(), 2);
        readers.take(&[reader(1, false), reader(2, true)]);
        assert_eq!(readers.reading(), 1);
        readers.take(&[reader(1, true), reader(2, true)]);
        assert_eq!(readers.reading(), 2, "it came again");
        readers.take(&[reader(3, false)]);
        assert_eq!((readers.reading(), readers.0.len()), (0, 1), "one that was quicker than the news of it");
    }
}
