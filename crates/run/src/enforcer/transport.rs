//! Executes one motif over lanes: sends and receives its parts round by round.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plan::RoundPart;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::EnforcerError;
use super::motif_task::{MotifTask, ROUND_GRACE, diverged};
use super::reconnect::Reconnector;
use super::shm::ShmTransport;
use super::stream::{MessageKind, ReliableStream, Subject};
use super::sums::Elements;

/// Size of the staging buffer for elements that are received to be reduced; it fits in a core's cache.
const STAGE_WORDS: usize = 8 << 10;

/// Maximum time for the last messages to be delivered when a rank gives up.
const ENDING: Duration = Duration::from_secs(5);

/// After this much silence, a rank probes whether the channel still reaches the ranks it waits for.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// A lane without progress for this long (a straggler) does not hold back other lanes.
const STALL_THRESHOLD: Duration = Duration::from_millis(20);

/// The lanes of one channel.
#[derive(Debug)]
pub(super) struct ChannelTransport {
    /// Lane to each rank; `None` for this one.
    pub lanes: Vec<Option<ReliableStream>>,
    /// Becomes readable when this rank must stop, or peers have opened connections.
    pub wake: OwnedFd,
    pub is_stopped: Arc<AtomicBool>,
    pub mender: Reconnector,
    pub timeout: Duration,
    /// Maximum lead, in bytes, of the data sent to one rank over the data sent to another in the same
    /// round. If flows share links, a flow that gets less than its fair share otherwise finishes last,
    /// alone on its links.
    slack: usize,
    /// Whether some data is held back because of `slack`.
    is_kept_back: bool,
    stage: Vec<u64>,
    /// Shared-memory transport, if all ranks map each other's vectors; then lanes only carry wake-ups.
    pull: Option<ShmTransport>,
}

/// A part to be sent to one rank in a round.
struct Sending {
    part: RoundPart,
    done: usize,
    /// Number of its bytes that have really been sent, and the time of the last progress.
    left: usize,
    since: Instant,
}

/// A part to be received from one rank in a round.
struct Receiving {
    part: RoundPart,
    done: usize,
    /// Bytes of a partially received element.
    rest: [u8; 8],
    rest_length: usize,
    /// Buffer that holds the part until it is complete, if the round needs that.
    aside: Option<Vec<u8>>,
}

impl ChannelTransport {
    pub fn new(
        lanes: Vec<Option<ReliableStream>>,
        (wake, is_stopped): (OwnedFd, Arc<AtomicBool>),
        mender: Reconnector,
        (timeout, slack): (Duration, usize),
        pull: Option<ShmTransport>,
    ) -> Self {
        let stage = vec![0; STAGE_WORDS];
        Self { lanes, wake, is_stopped, mender, timeout, slack, is_kept_back: false, stage, pull }
    }

    /// Resumes lanes on connections that peers have opened while no motif is in execution: the peers
    /// may lack bytes that were sent before.
    ///
    /// # Errors
    /// Another rank is lost or stuck.
    pub fn tend(&mut self) -> Result<(), EnforcerError> {
        if self.mender.take_offers(&mut self.lanes) { self.flush(&"sending again") } else { Ok(()) }
    }

    /// Sends all unsent data that peers wait for.
    fn flush(&mut self, doing: &dyn Display) -> Result<(), EnforcerError> {
        self.until_done((doing, self.timeout), |line| {
            let owing = line.lanes.iter().flatten().filter(|lane| lane.is_owing());
            Ok((false, owing.map(|lane| lane.peer).collect()))
        })
    }

    /// Executes a motif.
    ///
    /// # Errors
    /// Another rank is lost, stuck, or executes something else.
    pub fn carry(&mut self, errand: &MotifTask<'_>) -> Result<(), EnforcerError> {
        if let Some(pull) = &mut self.pull {
            let (lanes, wake) = (&mut self.lanes[..], &self.wake);
            return pull.carry(errand, (lanes, wake), (&self.is_stopped, self.timeout));
        }
        let mut notified = vec![false; self.lanes.len()];
        for (number, round) in (0..).zip(errand.rounds) {
            let timeout = self.timeout + ROUND_GRACE * number;
            let mut sends: Vec<Sending> =
                round.sends.iter().map(|&part| Sending::new(part)).collect();
            let mut receives: Vec<Receiving> = round
                .receives
                .iter()
                .map(|&part| {
                    let aside = round.is_aside.then(|| vec![0; errand.bytes(&part)]);
                    Receiving { part, done: 0, rest: [0; 8], rest_length: 0, aside }
                })
                .collect();
            let mut aside: Vec<(u32, Vec<u8>)> = Vec::new();
            self.until_done((errand, timeout), |line| {
                let mut moved = false;
                let most = line.most(&mut sends);
                for send in &mut sends {
                    moved |= line.send(errand, send, most, &mut notified)?;
                }
                line.is_kept_back = sends.iter().any(|send| send.done >= most);
                for receive in &mut receives {
                    moved |= line.receive(errand, receive)?;
                }
                sends.retain(|send| send.done < errand.bytes(&send.part));
                receives.retain_mut(|receive| {
                    let is_done = receive.done == errand.bytes(&receive.part);
                    if is_done && let Some(kept) = receive.aside.take() {
                        aside.push((receive.part.peer, kept));
                    }
                    !is_done
                });
                let wanted = receives.iter().map(|receive| receive.part.peer);
                Ok((moved, wanted.chain(sends.iter().map(|send| send.part.peer)).collect()))
            })?;
            if let Some(part) = round.receives.first().filter(|_| round.is_aside) {
                let (start, length) = (errand.start(part), errand.bytes(part));
                // SAFETY: as in `send`; all that other ranks sent was received into other buffers.
                let own = unsafe { errand.work.slice_mut(start, length) };
                aside.sort_unstable_by_key(|&(rank, _)| rank);
                let others = aside.iter().map(|(rank, came)| Ok((*rank, &came[..])));
                let own = (own, self.mender.rank);
                errand.elements.combine_in_order(own, others, &mut Vec::new())?;
            }
        }
        // No other code flushes what is left in the lanes.
        self.flush(errand)
    }

    /// Reports to all other ranks that this rank has given up, as far as possible without blocking on
    /// them.
    pub fn give_up(&mut self, reason: &str) {
        if let Some(pull) = &self.pull {
            return pull.give_up(&mut self.lanes, reason);
        }
        let subject = Subject { step: 0, operation: 0, motif: 0, digest: 0 };
        for lane in self.lanes.iter_mut().flatten() {
            // A rank that does not receive the message sees the connection end.
            lane.put_text(MessageKind::GivenUp, subject, reason);
            let _ = lane.flush();
        }
        // Closing a socket with unread data resets it and discards data in flight; so wait for
        // delivery.
        let deadline = Instant::now() + ENDING;
        while self.lanes.iter().flatten().any(ReliableStream::is_under_way)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        for lane in self.lanes.iter().flatten() {
            lane.socket.shut_down();
        }
    }

    /// Repeats `go_on` until it waits for no rank; handles timeouts, stalls and reconnects (the event
    /// loop).
    fn until_done(
        &mut self,
        (doing, timeout): (&dyn Display, Duration),
        mut go_on: impl FnMut(&mut Self) -> Result<(bool, Vec<u32>), EnforcerError>,
    ) -> Result<(), EnforcerError> {
        let mut since = Instant::now();
        let mut looked = since;
        self.is_kept_back = false;
        loop {
            let (mut moved, waits_for) = go_on(self)?;
            for lane in self.lanes.iter_mut().flatten().filter(|lane| lane.is_resuming()) {
                let heard = lane.hear();
                moved |= usable(lane, heard, doing)?.unwrap_or(false);
            }
            for lane in self.lanes.iter_mut().flatten().filter(|lane| !lane.is_flushed()) {
                let flushed = lane.flush();
                moved |= usable(lane, flushed, doing)?.unwrap_or(false);
            }
            let Some(&rank) = waits_for.first() else { return Ok(()) };
            moved |= self.mend(&waits_for, doing)?;
            if moved {
                (since, looked) = (Instant::now(), Instant::now());
                continue;
            }
            let waited = since.elapsed();
            if waited >= timeout {
                let (doing, seconds) = (doing.to_string(), waited.as_secs_f64());
                return Err(EnforcerError::Late { rank, doing, seconds });
            }
            let patience = SILENCE_MAX.min(timeout / 4);
            if looked.elapsed() >= patience {
                self.look_after(&waits_for);
                looked = Instant::now();
                continue;
            }
            let most = if self.is_kept_back { STALL_THRESHOLD } else { patience };
            self.wait(&waits_for, (timeout - waited).min(most))?;
        }
    }

    /// Reconnects broken lanes that these ranks use, or that have unsent data; returns whether it did
    /// any.
    pub fn mend(&mut self, ranks: &[u32], doing: &dyn Display) -> Result<bool, EnforcerError> {
        let mut any = self.mender.take_offers(&mut self.lanes);
        let is_wanted = |lane: &&ReliableStream| ranks.contains(&lane.peer) || lane.is_owing();
        let broken = self.lanes.iter().flatten().filter(|lane| lane.broken.is_some());
        let broken: Vec<u32> = broken.filter(is_wanted).map(|lane| lane.peer).collect();
        for rank in broken {
            let mended = self.mender.mend(&mut self.lanes, rank);
            any = true;
            mended.map_err(|reason| {
                let doing = doing.to_string();
                EnforcerError::Lost { rank, doing, reason }
            })?;
        }
        Ok(any)
    }

    /// After a silence, marks lanes to these ranks as broken if their channel does not reach them.
    fn look_after(&mut self, ranks: &[u32]) {
        for &rank in ranks {
            if let Some(lane) = &mut self.lanes[rank as usize]
                && !self.mender.leads_to(lane)
            {
                lane.broken.get_or_insert_with(|| "its channel does not lead there".to_owned());
            }
        }
    }

    /// Waits until a lane to one of these ranks can make progress.
    pub fn wait(&self, ranks: &[u32], timeout: Duration) -> Result<(), EnforcerError> {
        let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let mut timeout = timeout;
        for lane in self.lanes.iter().flatten().filter(|lane| lane.broken.is_none()) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, ranks.contains(&lane.peer) || lane.is_resuming());
            if flags.contains(PollFlags::IN) && lane.socket.has_received() {
                timeout = Duration::ZERO;
            }
            flags.set(PollFlags::OUT, lane.can_flush());
            if !flags.is_empty() {
                polled.push(PollFd::from_borrowed_fd(lane.socket.as_fd(), flags));
            }
        }
        let limit = Timespec::try_from(timeout).expect("a timeout is hours at most");
        // Ignored: an interruption is treated as an event; the caller checks everything again.
        let _ = poll(&mut polled, Some(&limit));
        if polled[0].revents().contains(PollFlags::IN) {
            // The count carries no further information.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        if self.is_stopped.load(Ordering::Relaxed) { Err(EnforcerError::Closed) } else { Ok(()) }
    }

    /// Returns how many bytes of its part may be put for any rank now.
    fn most(&self, sends: &mut [Sending]) -> usize {
        if sends.len() < 2 {
            return usize::MAX;
        }
        let now = Instant::now();
        let mut least = usize::MAX;
        for send in sends {
            let lane =
                self.lanes[send.part.peer as usize].as_ref().expect("a rank sends to others");
            let left = send.done.saturating_sub(lane.backlog());
            if left > send.left {
                (send.left, send.since) = (left, now);
            }
            if now - send.since < STALL_THRESHOLD {
                least = least.min(left);
            }
        }
        least.saturating_add(self.slack)
    }

    fn send(
        &mut self,
        errand: &MotifTask<'_>,
        send: &mut Sending,
        most: usize,
        notified: &mut [bool],
    ) -> Result<bool, EnforcerError> {
        let peer = send.part.peer;
        let lane = self.lanes[peer as usize].as_mut().expect("a rank sends to others");
        // Acknowledgements free the window; they are not behind anything that this rank waits for.
        let heard = lane.frame();
        let heard = usable(lane, heard, errand)?.flatten();
        if heard.is_some_and(|head| head.kind == MessageKind::GivenUp) {
            return Err(EnforcerError::Reported { rank: peer, reason: lane.take_text() });
        }
        if !notified[peer as usize]
            && let Some(reason) = errand.poison.lock().as_ref()
        {
            notified[peer as usize] = lane.put_text(MessageKind::Poison, errand.subject, reason);
        }
        let (start, length) = (errand.start(&send.part), errand.bytes(&send.part));
        // SAFETY: concurrent motifs, and the parts that a round sends and receives, have disjoint
        // ranges, and the range is in bounds of the vector, as was checked when it was submitted.
        let elements = unsafe { errand.work.slice(start + send.done, length - send.done) };
        let elements = &elements[..elements.len().min(most.saturating_sub(send.done))];
        let put = lane.put(errand.subject, elements);
        send.done += put;
        Ok(put > 0)
    }

    fn receive(
        &mut self,
        errand: &MotifTask<'_>,
        receive: &mut Receiving,
    ) -> Result<bool, EnforcerError> {
        let peer = receive.part.peer;
        let lane = self.lanes[peer as usize].as_mut().expect("a rank receives from others");
        let total = errand.bytes(&receive.part);
        let mut moved = false;
        while receive.done < total {
            let head = lane.frame();
            let Some(head) = usable(lane, head, errand)?.flatten() else { break };
            match head.kind {
                MessageKind::GivenUp => {
                    return Err(EnforcerError::Reported { rank: peer, reason: lane.take_text() });
                }
                _ if head.subject != errand.subject => {
                    return Err(diverged(peer, (&head.subject, None), errand));
                }
                MessageKind::Poison => {
                    let reason = lane.take_text();
                    errand.poison.lock().get_or_insert(reason);
                    moved = true;
                    continue;
                }
                MessageKind::Data | MessageKind::Read => {}
            }
            let start = errand.start(&receive.part);
            // SAFETY: as in `send`.
            let there = || unsafe { errand.work.slice_mut(start, total) };
            let count = if let Some(aside) = &mut receive.aside {
                lane.read_payload(&mut aside[receive.done..])
            } else if receive.part.sums {
                let stage = bytemuck::cast_slice_mut(&mut self.stage);
                receive.sum(lane, there(), errand.elements, stage)
            } else {
                lane.read_payload(&mut there()[receive.done..])
            };
            receive.done += *count.as_ref().unwrap_or(&0);
            if usable(lane, count, errand)?.is_none_or(|count| count == 0) {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }
}

impl Sending {
    fn new(part: RoundPart) -> Self {
        Self { part, done: 0, left: 0, since: Instant::now() }
    }
}

impl Receiving {
    /// Reduces received elements into local ones, element by element.
    fn sum(
        &mut self,
        lane: &mut ReliableStream,
        there: &mut [u8],
        elements: Elements,
        stage: &mut [u8],
    ) -> io::Result<usize> {
        let rest = self.rest_length;
        stage[..rest].copy_from_slice(&self.rest[..rest]);
        let most = stage.len().min(rest + there.len() - self.done);
        let count = lane.read_payload(&mut stage[rest..most])?;
        let whole = (rest + count) / elements.size() * elements.size();
        let from = self.done - rest;
        elements.combine(&mut there[from..from + whole], &stage[..whole]);
        self.rest_length = rest + count - whole;
        self.rest[..self.rest_length].copy_from_slice(&stage[whole..rest + count]);
        Ok(count)
    }
}

/// Unwraps the result of an operation on a lane; `None` if the connection is broken, which is recorded.
pub(super) fn usable<T>(
    lane: &mut ReliableStream,
    given: io::Result<T>,
    doing: &dyn Display,
) -> Result<Option<T>, EnforcerError> {
    let error = match given {
        Ok(given) => return Ok(Some(given)),
        Err(error) => error,
    };
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "its connection has ended".to_owned(),
        io::ErrorKind::InvalidData => {
            let (rank, doing, reason) = (lane.peer, doing.to_string(), error.to_string());
            return Err(EnforcerError::Lost { rank, doing, reason });
        }
        _ => error.to_string(),
    };
    lane.broken.get_or_insert(reason);
    Ok(None)
}
