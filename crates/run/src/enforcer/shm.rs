//! Executes one motif in shared memory: the receiver reads elements directly from the sender's range.
//!
//! A rank publishes its progress. Others read its vector once it has completed the rounds before; it
//! overwrites what they have read once they have completed that round. A waiting rank spins, then
//! yields its core, and then sleeps until it is woken.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plan::{Round, RoundPart};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::EnforcerError;
use super::arena::{ASIDE_BYTES, Board, Recorded, SharedArena, mark};
use super::motif_task::{MotifTask, ROUND_GRACE, diverged};
use super::stream::{ReliableStream, Subject};

/// Tile size, in bytes, of the reduction of several vectors; a tile stays in a core's cache.
const TILE_BYTES: usize = 64 << 10;
/// Number of spins before a rank yields its core, if each rank has a core.
const LOOKS: u32 = 300;
/// Maximum number of yields before it sleeps: a count, as each yield may take long on a busy core.
const YIELDS: u32 = 2000;
/// Number of yields between reads of the clock.
const FEW_YIELDS: u32 = 50;
/// Maximum time it yields: on busy cores each yield may take a whole time slice.
const YIELDING_MAX: Duration = Duration::from_millis(100);
/// Maximum time it sleeps before it checks for lost ranks.
const SLEEP: Duration = Duration::from_millis(200);
/// Copies within vectors of at least this size bypass the caches (non-temporal stores).
const STREAMED_BYTES: usize = 32 << 20;
/// Progress after all rounds.
const END: u32 = u32::MAX;

/// A channel in shared memory, as used by one rank.
#[derive(Debug)]
pub(super) struct ShmTransport {
    ground: Arc<SharedArena>,
    /// Number of the channel.
    line: usize,
    rank: usize,
    ranks: usize,
    /// Number of motifs executed, and the ranks that may still read the staging areas of the last two,
    /// each with the progress at which it has read them.
    turn: u64,
    readers: [Vec<(usize, u64)>; 2],
    /// Peers that read this rank's elements in a turn but send it none: whether they execute the same
    /// motif has yet to be checked.
    unseen: Vec<(usize, u64, Subject)>,
    /// Scratch memory for sums that do not start with this rank's own elements.
    sum: Vec<u8>,
    looks: u32,
    /// Largest part, in bytes, that is staged so that the sender need not wait for its readers.
    aside_max: usize,
    /// Whether the connection to each rank has ended.
    gone: Vec<bool>,
}

/// What a wait needs: the connections that wake this rank, and the timeout.
struct Patience<'a> {
    lanes: &'a mut [Option<ReliableStream>],
    wake: &'a OwnedFd,
    is_stopped: &'a AtomicBool,
    timeout: Duration,
}

impl ShmTransport {
    pub fn new(ground: Arc<SharedArena>, line: usize, (rank, ranks): (usize, usize)) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Spinning is cheap if each rank has a core.
        let (looks, aside_max) =
            if ranks <= cores { (LOOKS, ASIDE_BYTES / 16) } else { (0, ASIDE_BYTES) };
        let (readers, gone) = ([Vec::new(), Vec::new()], vec![false; ranks]);
        let (sum, unseen) = (Vec::new(), Vec::new());
        Self { ground, line, rank, ranks, turn: 0, readers, unseen, sum, looks, aside_max, gone }
    }

    /// Reports to all other ranks that this rank has given up.
    pub fn give_up(&self, lanes: &mut [Option<ReliableStream>], reason: &str) {
        self.own().give_up(reason);
        for lane in lanes.iter_mut().flatten() {
            ring(lane);
            lane.socket.shut_down();
        }
    }

    /// Executes a motif.
    ///
    /// # Errors
    /// Another rank is lost, stuck, or executes something else.
    pub fn carry(
        &mut self,
        errand: &MotifTask<'_>,
        (lanes, wake): (&mut [Option<ReliableStream>], &OwnedFd),
        (is_stopped, timeout): (&AtomicBool, Duration),
    ) -> Result<(), EnforcerError> {
        let mut patience = Patience { lanes, wake, is_stopped, timeout };
        self.turn += 1;
        let turn = self.turn;
        let rounds = errand.rounds;
        self.look_at_unseen(errand)?;
        let mut readers = std::mem::take(&mut self.readers[turn as usize % 2]);
        for (peer, until) in readers.drain(..) {
            self.wait_for(peer, until, errand, &mut patience)?;
        }
        let Some(first) = rounds.first() else {
            self.proceed(mark(turn, END), patience.lanes);
            return Ok(());
        };
        let (place, is_aside) = self.place(errand);
        self.own().publish(turn, (errand.subject, errand.name), place);
        self.pass_poison_on(errand);
        self.proceed(mark(turn, first.number), patience.lanes);
        for (behind, round) in rounds.iter().enumerate() {
            patience.timeout = timeout + ROUND_GRACE * behind as u32;
            for (peer, until) in self.readers_of(&rounds[..behind], round) {
                self.wait_for(peer, until, errand, &mut patience)?;
            }
            if round.is_aside {
                self.combine_aside(errand, round, &mut patience)?;
            } else {
                self.receive(errand, round, &mut patience)?;
            }
            self.pass_poison_on(errand);
            let next = rounds.get(behind + 1).map_or(END, |round| round.number);
            self.proceed(mark(turn, next), patience.lanes);
        }
        for round in rounds.iter().rev() {
            for send in &round.sends {
                let peer = send.peer as usize;
                if !readers.iter().any(|&(known, _)| known == peer) {
                    readers.push((peer, mark(turn, round.number) + 1));
                }
            }
        }
        let sources = || rounds.iter().flat_map(|round| &round.receives);
        for &(peer, _) in &readers {
            if !sources().any(|part| part.peer as usize == peer) {
                self.unseen.push((peer, turn, errand.subject));
            }
        }
        if is_aside {
            self.readers[turn as usize % 2] = readers;
            return self.look_at_unseen(errand);
        }
        for (peer, until) in readers {
            self.wait_for(peer, until, errand, &mut patience)?;
        }
        self.look_at_unseen(errand)
    }

    /// Checks which motifs the peers in `unseen` execute, as far as they have reached them. This
    /// detects, for example, two ranks that both act as the root.
    fn look_at_unseen(&mut self, errand: &MotifTask<'_>) -> Result<(), EnforcerError> {
        let (ground, line) = (&self.ground, self.line);
        let mut other = None;
        self.unseen.retain(|&(peer, turn, subject)| {
            let board = ground.board(peer, line);
            match board.recorded(turn) {
                Recorded::NotYet => return true,
                Recorded::As(found) if found != subject => {
                    other.get_or_insert((peer, subject, found, board.name(turn)));
                }
                Recorded::As(_) | Recorded::Nothing => {}
            }
            false
        });
        let Some((peer, subject, found, name)) = other else { return Ok(()) };
        let rank = peer as u32;
        if subject == errand.subject {
            return Err(diverged(rank, (&found, Some(name)), errand));
        }
        let Subject { step, operation, motif, .. } = subject;
        Err(EnforcerError::Diverged {
            rank,
            found: format!("{name} in step {} (motif {})", found.step, found.motif),
            expected: format!("operation {operation} in step {step} (motif {motif})"),
        })
    }

    fn own(&self) -> &Board {
        self.ground.own(self.line)
    }

    /// Publishes this rank's progress, and wakes sleeping ranks.
    fn proceed(&self, mark: u64, lanes: &mut [Option<ReliableStream>]) {
        self.own().proceed(mark);
        for lane in lanes.iter_mut().flatten() {
            if self.ground.board(lane.peer as usize, self.line).is_asleep() {
                ring(lane);
            }
        }
    }

    fn pass_poison_on(&self, errand: &MotifTask<'_>) {
        if let Some(reason) = errand.poison.lock().as_ref() {
            self.own().poison(self.turn, reason);
        }
    }

    /// Returns the ranks that must have read an earlier round's parts before this round overwrites
    /// them, each with the progress at which it has.
    fn readers_of(&self, before: &[Round], round: &Round) -> Vec<(usize, u64)> {
        let is_over = |send: &RoundPart| {
            round.receives.iter().any(|receive| {
                receive.start < send.start + send.count
                    && send.start < receive.start + receive.count
            })
        };
        let mut readers = Vec::new();
        for earlier in before {
            for send in earlier.sends.iter().filter(|send| is_over(send)) {
                readers.push((send.peer as usize, mark(self.turn, earlier.number) + 1));
            }
        }
        readers
    }

    // Rounds

    /// Receives the parts of a round: reduces once all are ready, and copies parts as they become
    /// ready.
    fn receive(
        &mut self,
        errand: &MotifTask<'_>,
        round: &Round,
        patience: &mut Patience<'_>,
    ) -> Result<(), EnforcerError> {
        let until = mark(self.turn, round.number);
        let (sums, mut copies): (Vec<&RoundPart>, Vec<&RoundPart>) =
            round.receives.iter().partition(|part| part.sums);
        for part in &sums {
            self.wait_for(part.peer as usize, until, errand, patience)?;
        }
        for same in sums.chunk_by(|one, other| (one.start, one.count) == (other.start, other.count))
        {
            self.add(errand, same)?;
        }
        while !copies.is_empty() {
            let is_there = |part: &&RoundPart| {
                self.ground.board(part.peer as usize, self.line).progress() >= until
            };
            let next = copies.iter().position(is_there).unwrap_or(0);
            let part = copies.swap_remove(next);
            self.wait_for(part.peer as usize, until, errand, patience)?;
            let (start, length) = (errand.start(part), errand.bytes(part));
            let there = self.elements(errand, part)?;
            // SAFETY: concurrent motifs, and the parts that a round sends and receives, have disjoint
            // ranges, and the ranks that read what is overwritten have finished.
            copy(there, unsafe { errand.work.slice_mut(start, length) }, errand.work.length());
        }
        Ok(())
    }

    /// Reduces the parts of several ranks into the same range, tile by tile.
    fn add(&self, errand: &MotifTask<'_>, parts: &[&RoundPart]) -> Result<(), EnforcerError> {
        let came: Vec<&[u8]> =
            parts.iter().map(|part| self.elements(errand, part)).collect::<Result<_, _>>()?;
        let (start, length) = (errand.start(parts[0]), errand.bytes(parts[0]));
        for from in (0..length).step_by(TILE_BYTES) {
            let until = length.min(from + TILE_BYTES);
            // SAFETY: as for copies.
            let there = unsafe { errand.work.slice_mut(start + from, until - from) };
            for one in &came {
                errand.elements.combine(there, &one[from..until]);
            }
        }
        Ok(())
    }

    /// Returns the offset at which other ranks find this rank's elements, and whether they were staged:
    /// then this rank need not wait for its readers.
    fn place(&self, errand: &MotifTask<'_>) -> (usize, bool) {
        let parts = |round: &Round| {
            let ends =
                |part: &RoundPart| (errand.start(part), errand.start(part) + errand.bytes(part));
            let ends = round.sends.iter().map(ends);
            ends.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
        };
        if let [round] = errand.rounds
            && let Some((start, end)) = parts(round)
            && (end - start <= self.aside_max || round.is_aside)
        {
            let at = (self.line, self.turn);
            // SAFETY: the readers of two turns before have finished, and only this thread writes the
            // area.
            let place = unsafe { self.ground.keep_aside(at, errand.work, (start, end - start)) };
            return (place, true);
        }
        let place = self.ground.place_of(errand.work);
        (place.expect("submitted vectors lie there"), false)
    }

    /// Reduces the staged elements of all ranks, in rank order.
    fn combine_aside(
        &mut self,
        errand: &MotifTask<'_>,
        round: &Round,
        patience: &mut Patience<'_>,
    ) -> Result<(), EnforcerError> {
        let until = mark(self.turn, round.number);
        let Some(part) = round.receives.first() else { return Ok(()) };
        let (start, length) = (errand.start(part), errand.bytes(part));
        // SAFETY: the vector is this rank's, and other ranks read only the staging areas.
        let there = unsafe { errand.work.slice_mut(start, length) };
        for part in &round.receives {
            self.wait_for(part.peer as usize, until, errand, patience)?;
        }
        let mut sum = std::mem::take(&mut self.sum);
        let others =
            round.receives.iter().map(|part| Ok((part.peer, self.elements(errand, part)?)));
        let done = errand.elements.combine_in_order((there, self.rank as u32), others, &mut sum);
        self.sum = sum;
        done
    }

    /// Borrows the elements that another rank sends to this one, if it executes the same motif.
    fn elements(&self, errand: &MotifTask<'_>, part: &RoundPart) -> Result<&[u8], EnforcerError> {
        let place = self.check(part.peer as usize, errand)?;
        // For staged elements, `place` may be before the start of the range; hence the wrap-around.
        let from = place.wrapping_add(part.there as usize * errand.elements.size());
        // SAFETY: the rank has completed the earlier rounds, and overwrites the elements only once this
        // rank has completed this round.
        let found = unsafe { self.ground.elements(part.peer as usize, from, errand.bytes(part)) };
        found.ok_or_else(|| EnforcerError::Diverged {
            rank: part.peer,
            found: "a vector that lies nowhere".to_owned(),
            expected: errand.to_string(),
        })
    }

    /// Returns the offset of a rank's vector, if it executes the same motif; takes over its poison.
    fn check(&self, peer: usize, errand: &MotifTask<'_>) -> Result<usize, EnforcerError> {
        let board = self.ground.board(peer, self.line);
        match board.published(self.turn) {
            Some((subject, place)) if subject == errand.subject => {
                if let Some(reason) = board.poisoned(self.turn) {
                    errand.poison.lock().get_or_insert(reason);
                }
                Ok(place)
            }
            Some((subject, _)) => {
                let name = Some(board.name(self.turn));
                Err(diverged(peer as u32, (&subject, name), errand))
            }
            None => Err(EnforcerError::Diverged {
                rank: peer as u32,
                found: "something else meanwhile".to_owned(),
                expected: errand.to_string(),
            }),
        }
    }

    // Waiting

    /// Waits until the progress of a rank is at least `until`.
    fn wait_for(
        &mut self,
        peer: usize,
        until: u64,
        errand: &MotifTask<'_>,
        patience: &mut Patience<'_>,
    ) -> Result<(), EnforcerError> {
        let ground = self.ground.clone();
        let board = ground.board(peer, self.line);
        if is_there_soon(board, until, self.looks, std::hint::spin_loop) {
            return Ok(());
        }
        // Reading the clock takes longer than many waits.
        if is_there_soon(board, until, FEW_YIELDS, std::thread::yield_now) {
            return Ok(());
        }
        let since = Instant::now();
        for _ in 1..YIELDS / FEW_YIELDS {
            if is_there_soon(board, until, FEW_YIELDS, std::thread::yield_now) {
                return Ok(());
            }
            if since.elapsed() >= YIELDING_MAX {
                break;
            }
        }
        loop {
            self.own().sleep(true);
            let is_there = board.progress() >= until;
            if !is_there && board.ended().is_none() && !self.gone[peer] {
                self.doze(patience, patience.timeout.saturating_sub(since.elapsed()).min(SLEEP));
            }
            self.own().sleep(false);
            if is_there || board.progress() >= until {
                return Ok(());
            }
            let rank = peer as u32;
            if let Some(reason) = board.ended() {
                return Err(EnforcerError::Reported { rank, reason });
            }
            if self.gone[peer] {
                let (doing, reason) = (errand.to_string(), "its connection has ended".to_owned());
                return Err(EnforcerError::Lost { rank, doing, reason });
            }
            if patience.is_stopped.load(Ordering::Relaxed) {
                return Err(EnforcerError::Closed);
            }
            let waited = since.elapsed();
            if waited >= patience.timeout {
                let (doing, seconds) = (errand.to_string(), waited.as_secs_f64());
                return Err(EnforcerError::Late { rank, doing, seconds });
            }
        }
    }

    /// Sleeps until another rank wakes this one, or for at most `most`.
    fn doze(&mut self, patience: &mut Patience<'_>, most: Duration) {
        let mut polled = vec![PollFd::new(patience.wake, PollFlags::IN)];
        let mut peers = Vec::with_capacity(self.ranks);
        for lane in patience.lanes.iter().flatten().filter(|lane| !self.gone[lane.peer as usize]) {
            polled.push(PollFd::from_borrowed_fd(lane.socket.as_fd(), PollFlags::IN));
            peers.push(lane.peer as usize);
        }
        let limit = Timespec::try_from(most).expect("it is short");
        // Ignored: an interruption is treated as an event; the caller checks everything again.
        let _ = poll(&mut polled, Some(&limit));
        let woken: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        if woken[0] {
            // The count carries no further information.
            let _ = rustix::io::read(patience.wake, &mut [0; 8]);
        }
        for (&peer, _) in peers.iter().zip(&woken[1..]).filter(|(_, woken)| **woken) {
            let lane = patience.lanes[peer].as_mut().expect("it was polled");
            match lane.socket.read(&mut [0; 64]) {
                Ok(0) => self.gone[peer] = true,
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => {
                    self.gone[peer] = true;
                }
                _ => {}
            }
        }
    }
}

/// Polls the progress of a rank at most `looks` times; returns whether it reached `until`.
fn is_there_soon(board: &Board, until: u64, looks: u32, between: fn()) -> bool {
    for _ in 0..looks {
        if board.progress() >= until {
            return true;
        }
        between();
    }
    false
}

/// Copies a part of a vector. If the vector is larger than the caches, non-temporal stores bypass them:
/// the data would be evicted anyway, and the target is not read before it is written.
fn copy(source: &[u8], target: &mut [u8], whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= STREAMED_BYTES {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        // SAFETY: any bytes are valid `__m128i` words.
        let (head, words, tail) = unsafe { target.align_to_mut::<__m128i>() };
        let (from_head, rest) = source.split_at(head.len());
        let (from_words, from_tail) = rest.split_at(size_of_val(words));
        head.copy_from_slice(from_head);
        for (word, from) in words.iter_mut().zip(from_words.chunks_exact(size_of::<__m128i>())) {
            // SAFETY: `from` has the size of a word, and `word` is aligned; every x86-64 processor has
            // these instructions.
            unsafe { _mm_stream_si128(word, _mm_loadu_si128(from.as_ptr().cast())) };
        }
        tail.copy_from_slice(from_tail);
        // SAFETY: as above. The fence orders these stores before later ones, such as that of the
        // progress.
        unsafe { _mm_sfence() };
        return;
    }
    target.copy_from_slice(source);
}

/// Wakes the rank at the other end.
fn ring(lane: &mut ReliableStream) {
    // Ignored: a full socket wakes the peer as well, and a closed one has no sleeping peer.
    let _ = lane.socket.write(&[1]);
}
