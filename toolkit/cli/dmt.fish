# Completion of dmt in fish: dmt completion fish | source
function __dmt_complete
    dmt __complete fish (commandline -cp | string collect) 2>/dev/null
end
complete -c dmt -f -a '(__dmt_complete)'
complete -c dmt -F -n '__fish_seen_subcommand_from report generate adopt'
