//! Work in order, by key: the jobs of one key run one after another, and delay those of no other key.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

/// Idle time after which the thread of a key ends.
const IDLE: Duration = Duration::from_secs(5);

type Senders<K, J> = Mutex<HashMap<K, Sender<J>>>;

/// A queue, and while there is work a thread, for each key.
pub(crate) struct Queues<K, J>(Arc<Senders<K, J>>);

impl<K, J> Default for Queues<K, J> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, J> fmt::Debug for Queues<K, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues").field("keys", &self.0.lock().len()).finish()
    }
}

impl<K: Copy + Eq + Hash + Send + 'static, J: Send + 'static> Queues<K, J> {
    /// Queues a job; `work` does the jobs of its key from now on if none was queued for a while.
    pub fn submit(&self, key: K, job: J, work: impl Fn(J) + Send + 'static) {
        let mut senders = self.0.lock();
        // A thread removes its queue when it ends, unless it has panicked.
        let job = match senders.get(&key) {
            None => job,
            Some(sender) => match sender.send(job) {
                Ok(()) => return,
                Err(unsent) => unsent.0,
            },
        };
        let (sender, waiting) = channel();
        sender.send(job).expect("its other end is here");
        let queues = self.0.clone();
        std::thread::spawn(move || serve(&queues, key, &waiting, work));
        senders.insert(key, sender);
    }
}

/// Does the jobs of one key.
fn serve<K: Eq + Hash, J>(queues: &Senders<K, J>, key: K, waiting: &Receiver<J>, work: impl Fn(J)) {
    loop {
        let job = match waiting.recv_timeout(IDLE) {
            Ok(job) => job,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let mut queues = queues.lock();
                let Ok(job) = waiting.try_recv() else {
                    queues.remove(&key);
                    return;
                };
                job
            }
        };
        work(job);
    }
}
