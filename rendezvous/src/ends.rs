//! Who has ended as far as the service knows, for whoever would wait for them in vain.
//!
//! For readers by transports that notice nothing themselves. It only tells what the service said last; must never guess.

use crate::protocol::MemberId;
use std::collections::BTreeMap;
use tokio::sync::watch;

/// Those that somebody asked about.
#[derive(Debug, Default)]
pub(crate) struct Ends(BTreeMap<MemberId, watch::Sender<bool>>);

impl Ends {
    /// The news of `member`: true once it has ended.
    pub(crate) fn news(&mut self, member: MemberId) -> watch::Receiver<bool> {
        self.0.entry(member).or_default().subscribe()
    }

    /// The service says so of `member`.
    pub(crate) fn tell(&self, member: MemberId, ended: bool) {
        if let Some(news) = self.0.get(&member) {
            news.send_if_modified(|was| std::mem::replace(was, ended) != ended);
        }
    }
}
