//! A board in memory.

use crate::Board;
use async_trait::async_trait;
use flashboot_core::{Error, Kind, Result};
use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::sync::watch;

/// A board for tasks of one process; also what a [`crate::BoardServer`] serves.
#[derive(Debug)]
pub struct LocalBoard {
    values: Mutex<BTreeMap<String, String>>,
    changes: watch::Sender<u64>,
}

impl Default for LocalBoard {
    fn default() -> Self {
        Self { values: Mutex::default(), changes: watch::Sender::new(0) }
    }
}

impl LocalBoard {
    fn get(&self, name: &str) -> Option<String> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

#[async_trait]
impl Board for LocalBoard {
    async fn put(&self, name: &str, value: String) -> Result<()> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        match values.get(name) {
            Some(before) if *before != value => {
                return Err(Error::new(
                    Kind::Mismatch,
                    "board put",
                    format!("`{name}` is set to another value"),
                ));
            }
            Some(_) => return Ok(()),
            None => values.insert(name.to_owned(), value),
        };
        drop(values);
        self.changes.send_modify(|n| *n += 1);
        Ok(())
    }

    async fn wait(&self, name: &str, timeout: Duration) -> Result<String> {
        let mut changes = self.changes.subscribe();
        let set = async {
            loop {
                changes.borrow_and_update();
                if let Some(value) = self.get(name) {
                    return value;
                }
                // The sender is in `self`: it cannot be gone.
                let _ = changes.changed().await;
            }
        };
        tokio::time::timeout(timeout, set).await.map_err(|_| {
            Error::new(Kind::Deadline, "board wait", format!("nobody set `{name}` within {timeout:?}"))
        })
    }

    async fn look(&self, name: &str) -> Result<Option<String>> {
        Ok(self.get(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_value_is_set_once_and_waited_for() {
        let board = std::sync::Arc::new(LocalBoard::default());
        let waiting = tokio::spawn({
            let board = std::sync::Arc::clone(&board);
            async move { board.wait("a", Duration::from_secs(1)).await }
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
        board.put("a", "1".into()).await.unwrap();
        assert_eq!(waiting.await.unwrap(), Ok("1".into()));
        board.put("a", "1".into()).await.unwrap();
        assert_eq!(board.put("a", "2".into()).await.unwrap_err().kind(), Kind::Mismatch);
        assert_eq!(board.wait("b", Duration::from_secs(9)).await.unwrap_err().kind(), Kind::Deadline);
        assert_eq!(board.look("b").await, Ok(None));
    }
}
