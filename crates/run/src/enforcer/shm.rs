//! Carrying one motif out in memory that all ranks see: whoever receives reads where it lies.
//!
//! A rank says how far it is; others read its vector when it is behind the rounds before, and it writes
//! again what they have read when they are behind the round. Whoever waits looks again and again for a
//! moment, then lets others compute, and then sleeps until somebody wakes it.

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

/// Sums of several vectors are made so many bytes at a time, which stay in a core's cache.
const TILE_BYTES: usize = 64 << 10;
/// How often a rank looks for another before it lets others compute, if each has a core.
const LOOKS: u32 = 300;
/// How often it does so before it sleeps: counted, as whoever computes meanwhile may do so for long.
const YIELDS: u32 = 2000;
/// How often before it asks what time it is.
const FEW_YIELDS: u32 = 50;
/// How long it does so at most: where many compute, each time can take as long as a slice of theirs.
const YIELDING_MAX: Duration = Duration::from_millis(100);
/// How long it sleeps at most before it looks whether all are there.
const SLEEP: Duration = Duration::from_millis(200);
/// Copies of parts of vectors that are as long go past caches.
const STREAMED_BYTES: usize = 32 << 20;
/// Behind all rounds.
const END: u32 = u32::MAX;

/// A channel in memory, as one rank uses it.
#[derive(Debug)]
pub(super) struct ShmTransport {
    ground: Arc<SharedArena>,
    /// Which channel.
    line: usize,
    rank: usize,
    ranks: usize,
    /// How many motifs have been carried out, and who may still read what the last ones kept aside.
    turn: u64,
    readers: [Vec<(usize, u64)>; 2],
    /// Who reads this rank's elements of which turn and gives it none: it has still to be seen that it
    /// carries the same out.
    unseen: Vec<(usize, u64, Subject)>,
    /// Where sums are made that do not begin with this rank's own elements.
    sum: Vec<u8>,
    looks: u32,
    /// What is rather put aside than waited for.
    aside_max: usize,
    /// Whose connection has ended.
    gone: Vec<bool>,
}

/// What it takes to wait: connections that wake, and when to give up.
struct Patience<'a> {
    lanes: &'a mut [Option<ReliableStream>],
    wake: &'a OwnedFd,
    is_stopped: &'a AtomicBool,
    timeout: Duration,
}

impl ShmTransport {
    pub fn new(ground: Arc<SharedArena>, line: usize, (rank, ranks): (usize, usize)) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Waiting costs little where each rank has a core.
        let (looks, aside_max) =
            if ranks <= cores { (LOOKS, ASIDE_BYTES / 16) } else { (0, ASIDE_BYTES) };
        let (readers, gone) = ([Vec::new(), Vec::new()], vec![false; ranks]);
        let (sum, unseen) = (Vec::new(), Vec::new());
        Self { ground, line, rank, ranks, turn: 0, readers, unseen, sum, looks, aside_max, gone }
    }

    /// Tells all others that this rank has given up.
    pub fn give_up(&self, lanes: &mut [Option<ReliableStream>], reason: &str) {
        self.own().give_up(reason);
        for lane in lanes.iter_mut().flatten() {
            ring(lane);
            lane.socket.shut_down();
        }
    }

    /// Carries a motif out.
    ///
    /// # Errors
    /// Another rank is gone, stuck, or does something else.
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

    /// Compares what those carry out that read and give nothing, as far as they have come to it. Two
    /// ranks that both take themselves for the root find each other so.
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

    /// Says how far this rank is, and wakes whoever sleeps.
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

    /// Who must have read what, before something is written over it.
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

    /// Reads all that comes in a round: sums together when all are there, and copies as they are.
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
            // SAFETY: motifs that run at a time, and what a round sends and receives, are of different
            // ranges, and whoever has read what is overwritten is done.
            copy(there, unsafe { errand.work.slice_mut(start, length) }, errand.work.length());
        }
        Ok(())
    }

    /// Adds what several have for the same place.
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

    /// Where others find what this rank has, and whether that was put aside: then nobody has to wait
    /// until they have read it.
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
            // SAFETY: whoever read it two turns before is done, and only this thread writes the range.
            let place = unsafe { self.ground.keep_aside(at, errand.work, (start, end - start)) };
            return (place, true);
        }
        let place = self.ground.place_of(errand.work);
        (place.expect("submitted vectors lie there"), false)
    }

    /// Adds up what all keep aside, in the order of ranks.
    fn combine_aside(
        &mut self,
        errand: &MotifTask<'_>,
        round: &Round,
        patience: &mut Patience<'_>,
    ) -> Result<(), EnforcerError> {
        let until = mark(self.turn, round.number);
        let Some(part) = round.receives.first() else { return Ok(()) };
        let (start, length) = (errand.start(part), errand.bytes(part));
        // SAFETY: the vector is this rank's, and others read only what is kept aside.
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

    /// What another rank has for this one, if it does the same.
    fn elements(&self, errand: &MotifTask<'_>, part: &RoundPart) -> Result<&[u8], EnforcerError> {
        let place = self.check(part.peer as usize, errand)?;
        // Of what is kept aside the vector begins somewhere else.
        let from = place.wrapping_add(part.there as usize * errand.elements.size());
        // SAFETY: the rank is behind the rounds before, and writes it when this one is behind this one.
        let found = unsafe { self.ground.elements(part.peer as usize, from, errand.bytes(part)) };
        found.ok_or_else(|| EnforcerError::Diverged {
            rank: part.peer,
            found: "a vector that lies nowhere".to_owned(),
            expected: errand.to_string(),
        })
    }

    /// Where a rank's vector lies, if it does the same; learns of its poison.
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

    /// Waits until a rank is so far.
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
        // Asking a clock takes as long as many a wait.
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
                return Err(EnforcerError::Told { rank, reason });
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

    /// Sleeps until somebody wakes this rank, or for so long.
    fn doze(&mut self, patience: &mut Patience<'_>, most: Duration) {
        let mut polled = vec![PollFd::new(patience.wake, PollFlags::IN)];
        let mut peers = Vec::with_capacity(self.ranks);
        for lane in patience.lanes.iter().flatten().filter(|lane| !self.gone[lane.peer as usize]) {
            polled.push(PollFd::from_borrowed_fd(lane.socket.as_fd(), PollFlags::IN));
            peers.push(lane.peer as usize);
        }
        let limit = Timespec::try_from(most).expect("it is short");
        // An interruption is as good as an event: all is looked at again.
        let _ = poll(&mut polled, Some(&limit));
        let woken: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        if woken[0] {
            // It says no more than that there is something.
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

/// Whether a rank gets so far within so many looks.
fn is_there_soon(board: &Board, until: u64, looks: u32, between: fn()) -> bool {
    for _ in 0..looks {
        if board.progress() >= until {
            return true;
        }
        between();
    }
    false
}

/// Copies a part of a vector. What is larger than caches goes past them: nobody finds it there anyway, and
/// memory is not read before it is written.
fn copy(source: &[u8], target: &mut [u8], whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= STREAMED_BYTES {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        // SAFETY: any bytes are such words.
        let (head, words, tail) = unsafe { target.align_to_mut::<__m128i>() };
        let (from_head, rest) = source.split_at(head.len());
        let (from_words, from_tail) = rest.split_at(size_of_val(words));
        head.copy_from_slice(from_head);
        for (word, from) in words.iter_mut().zip(from_words.chunks_exact(size_of::<__m128i>())) {
            // SAFETY: `from` has as many bytes, and `word` is aligned; the instructions are in every
            // processor of this kind.
            unsafe { _mm_stream_si128(word, _mm_loadu_si128(from.as_ptr().cast())) };
        }
        tail.copy_from_slice(from_tail);
        // SAFETY: as above. What was written is seen by whoever sees what is written after this.
        unsafe { _mm_sfence() };
        return;
    }
    target.copy_from_slice(source);
}

/// Wakes the rank at the other end.
fn ring(lane: &mut ReliableStream) {
    // One that is full wakes it as well, and one that is gone sleeps no more.
    let _ = lane.socket.write(&[1]);
}
