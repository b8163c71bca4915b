fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    if args.len() == 1 {
        let run = sim::faults::run(args[0], true);
        for line in &run.log {
            println!("{line}");
        }
        println!("{:?} {:?}", run.violation, run.counts);
        return;
    }
    let mut counts = sim::faults::FaultCounts::default();
    let mut bad = 0;
    let mut longest = base::Nanos(0);
    for seed in args[0]..args[1] {
        let run = sim::faults::run(seed, false);
        counts.add(&run.counts);
        longest = longest.max(run.longest_wait);
        if let Some(v) = run.violation {
            bad += 1;
            if bad < 30 {
                println!("{v}");
            }
        }
    }
    println!("{bad} violations, longest {longest:?}; {counts:?}");
}
